"""Rotary position embedding: frequencies of all scaling types, and tables of cosines and sines."""

import math

import torch
from torch import Tensor

from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.quantization.base import WeightFactory

PAGE = 1024
"""Positions computed at a time, always the same number: results may depend on the length of a vector."""


class Rotary:
    """A table of cosines and sines for up to `max_positions` positions; each step gathers its rows.

    The table of a long context takes seconds to compute, so `PositionTables` computes the pages that steps need.
    """

    def __init__(self, config: RopeConfig, max_positions: int, factory: WeightFactory) -> None:
        self._frequencies, self._factor = rope_frequencies(config, max_positions)
        self._table = torch.empty(max_positions, 2, len(self._frequencies), device=factory.device)
        self._gather = factory.ops.gather

    @torch.inference_mode()
    def compute_page(self, page: int) -> None:
        """Compute the rows of the positions from `page * PAGE` on."""
        rows = self._table[page * PAGE : (page + 1) * PAGE]
        positions = torch.arange(page * PAGE, (page + 1) * PAGE).unsqueeze(1).float()
        angles = positions * self._frequencies
        rows.copy_(torch.stack((angles.cos() * self._factor, angles.sin() * self._factor), 1)[: len(rows)])

    def angles(self, positions: Tensor) -> Tensor:
        """Cosines and sines of `positions` [num_tokens], all of them computed -> [num_tokens, 2, dim / 2] float32."""
        return self._gather(self._table, positions)


class Temperatures:
    """A table of the factors on queries at `max_positions` positions; each step gathers its rows."""

    def __init__(self, config: TemperatureConfig, max_positions: int, factory: WeightFactory) -> None:
        positions = torch.arange(max_positions).unsqueeze(1) + config.first
        factors = 1 + config.beta * torch.log(1 + torch.floor(positions / config.every))
        self._table = factors.to(factory.device)
        self._gather = factory.ops.gather

    def at(self, positions: Tensor) -> Tensor:
        """`positions` [num_tokens] -> [num_tokens, 1] float32."""
        return self._gather(self._table, positions)


def rope_frequencies(config: RopeConfig, max_positions: int = 0) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] float32, and the factor on cosines and sines.

    Computed in float32 with the same order of operations as `transformers`, against which models are tested: at
    position 100,000, one bit of a frequency makes a difference of 0.01 radian.

    Args:
        max_positions: the maximum model length, which decides between longrope's short and long factors.
    """
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.type == "linear":
        return frequencies / config.factor, 1.0
    if config.type == "llama3":
        return _llama3(config, frequencies), 1.0
    if config.type == "yarn":
        return _yarn(config, exponents), _yarn_attention_factor(config)
    if config.type == "longrope":
        long = max_positions > config.original_max_position
        factors = torch.tensor(config.long_factor if long else config.short_factor)
        scale = config.attention_factor or 1.0 if config.mscales is None else config.mscales[long]
        return 1.0 / (factors * config.theta**exponents), scale
    if config.type == "proportional":
        turning = torch.arange(config.dim // 2) < int(config.share * config.dim // 2)
        return frequencies * turning / config.factor, 1.0
    if config.type == "frequency_factors":
        return frequencies / torch.tensor(config.frequency_factors), 1.0
    return frequencies, 1.0


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    old = config.original_max_position
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > old / low, frequencies / config.factor, frequencies)
    if low == high:
        return scaled
    smooth = (old / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = (wavelengths >= old / high) & (wavelengths <= old / low)
    return torch.where(between, smoothed, scaled)


def _yarn(config: RopeConfig, exponents: Tensor) -> Tensor:
    """YaRN: a ramp over the dimensions from kept to divided frequencies (Peng et al., 2023, arXiv:2309.00071)."""

    def dimension_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # as in the original implementation: avoids a ramp of width 0
    kept = 1 - ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = config.theta**exponents
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
