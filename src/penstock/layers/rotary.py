"""Rotary position embedding: frequencies of all scaling types, and tables of cosines and sines.

The tables are the same bits with every table of operations and on every machine: frequencies are computed in float64
and rounded to float32, an angle is the float32 product of position and frequency, as `transformers` has it, and its
cosine and sine are computed in float64 and rounded once (`portable_math.py`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.array_types import A
from penstock.layers.portable_math import cosines_and_sines, log, power
from penstock.layers.rope import RopeConfig, TemperatureConfig

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory

Floats = NDArray[np.float64]

PAGE = 1024
"""Positions computed at a time."""


class Rotary(Generic[A]):
    """A table of cosines and sines for up to `max_positions` positions; each step gathers its rows.

    The table of a long context takes long to compute, so `PositionTables` computes the pages that steps need.
    """

    def __init__(self, config: RopeConfig, max_positions: int, factory: WeightFactory[A]) -> None:
        self._frequencies, self._factor = rope_frequencies(config, max_positions)
        self._num_positions, self._constant, self._ops = max_positions, factory.constant, factory.ops
        self._table = factory.constant(np.empty((max_positions, 2, len(self._frequencies)), np.float32))
        self._axes = factory.constant(np.array(config.axes, np.int32)) if config.axes else None

    def compute_page(self, page: int) -> None:
        """Compute the rows of the positions from `page * PAGE` on."""
        positions = np.arange(page * PAGE, min((page + 1) * PAGE, self._num_positions))
        angles = positions[:, None].astype(np.float32) * self._frequencies
        rows = (np.stack(cosines_and_sines(angles), 1) * self._factor).astype(np.float32)
        self._ops.scatter(self._constant(rows), self._constant(positions), self._table)

    def angles(self, positions: A) -> A:
        """Cosines and sines of `positions` [num_tokens], all of them computed -> [num_tokens, 2, dim / 2] float32."""
        return self._ops.gather(self._table, positions)

    def angles_by_axis(self, positions: A) -> A | None:
        """Like `angles`, for `positions` [num_tokens, 3] int64 by axis; None: the embedding has one axis."""
        return None if self._axes is None else self._ops.gather_axes(self._table, positions, self._axes)


class Temperatures(Generic[A]):
    """A table of the factors on queries at `max_positions` positions; each step gathers its rows."""

    def __init__(self, config: TemperatureConfig, max_positions: int, factory: WeightFactory[A]) -> None:
        periods = (np.arange(max_positions) + config.first) // config.every
        logs = np.array([log(1 + period) for period in range(periods[-1] + 1)])
        self._table = factory.constant((1 + config.beta * logs).astype(np.float32)[periods, None])
        self._gather = factory.ops.gather

    def at(self, positions: A) -> A:
        """`positions` [num_tokens] -> [num_tokens, 1] float32."""
        return self._gather(self._table, positions)


def rope_frequencies(config: RopeConfig, max_positions: int = 0) -> tuple[NDArray[np.float32], float]:
    """Inverse frequencies [dim / 2], rounded once, and the factor on cosines and sines.

    Args:
        max_positions: the maximum model length, which decides between longrope's short and long factors.
    """
    frequencies, factor = _scaled_frequencies(config, max_positions)
    return frequencies.astype(np.float32), factor


def _scaled_frequencies(config: RopeConfig, max_positions: int) -> tuple[Floats, float]:
    pairs = range(config.dim // 2)
    frequencies = np.array([power(config.theta, Fraction(-2 * pair, config.dim)) for pair in pairs])
    if config.type == "linear":
        return frequencies / config.factor, 1.0
    if config.type == "llama3":
        return _llama3(config, frequencies), 1.0
    if config.type == "yarn":
        return _yarn(config, frequencies), _yarn_attention_factor(config)
    if config.type == "longrope":
        long = max_positions > config.original_max_position
        factors = np.array(config.long_factor if long else config.short_factor)
        scale = config.attention_factor or 1.0 if config.mscales is None else config.mscales[long]
        return frequencies / factors, scale
    if config.type == "proportional":
        turning = np.arange(config.dim // 2) < int(config.share * config.dim // 2)
        return frequencies * turning / config.factor, 1.0
    if config.type == "frequency_factors":
        return frequencies / np.array(config.frequency_factors), 1.0
    return frequencies, 1.0


def _llama3(config: RopeConfig, frequencies: Floats) -> Floats:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    old = config.original_max_position
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = np.where(wavelengths > old / low, frequencies / config.factor, frequencies)
    if low == high:
        return scaled
    smooth = (old / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = (wavelengths >= old / high) & (wavelengths <= old / low)
    return np.where(between, smoothed, scaled)


def _yarn(config: RopeConfig, frequencies: Floats) -> Floats:
    """YaRN: a ramp over the dimensions from kept to divided frequencies (Peng et al., 2023, arXiv:2309.00071)."""

    def dimension_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return config.dim * log(turns) / (2 * log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # as in the original implementation: avoids a ramp of width 0
    kept = 1 - np.clip((np.arange(config.dim // 2) - low) / (high - low), 0, 1)
    scaled: Floats = frequencies / config.factor * (1 - kept) + frequencies * kept
    return scaled


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
