"""Configs of position encodings: plain data, no torch. `layers/rotary.py` computes them."""

from typing import Literal

from penstock.dataclass import dataclass

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "frequency_factors", "proportional"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Each field below `type` applies only to the types that its docstring names."""

    dim: int
    """Number of rotated elements of a head."""
    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    """linear, llama3, yarn, proportional: factor of the context's extension."""
    original_max_position: int = 0
    """llama3, yarn, longrope: the context length of pre-training."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn."""
    beta_slow: float = 1.0
    """yarn."""
    attention_factor: float | None = None
    """yarn, longrope: factor on cosines and sines; None: derived from `factor`."""
    mscale: float = 0.0
    """yarn: together with `mscale_all_dim` determines the derived attention factor; 0: unset."""
    mscale_all_dim: float = 0.0
    """yarn."""
    truncate: bool = True
    """yarn: round the limits of the ramp to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency if the maximum model length is at most the original context."""
    long_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency if the maximum model length exceeds the original context."""
    mscales: tuple[float, float] | None = None
    """longrope: factors on cosines and sines with the short and the long factors; None: `attention_factor`."""
    share: float = 1.0
    """proportional: the fraction of frequencies that rotate; the others are 0."""
    frequency_factors: tuple[float, ...] = ()
    """frequency_factors: divisor of each frequency, the form in which GGUF files store llama3."""
    axes: tuple[int, ...] = ()
    """All types: for each frequency, which of a token's three positions (time, row, column) it rotates by, where
    tokens of images have such (M-RoPE; Wang et al., 2024, arXiv:2409.12191). (): each token has one position."""

    def context(self, max_position: int) -> int:
        """The model's context length in tokens, given `max_position` from its config.

        Checkpoints that leave the use of YaRN to the user, such as Qwen2.5, state the context before the extension.
        """
        if self.type != "yarn":
            return max_position
        return max(max_position, int(self.original_max_position * self.factor))


@dataclass(frozen=True, slots=True)
class TemperatureConfig:
    """Scales queries by their position p: by 1 + beta * log(1 + floor((p + first) / every))."""

    beta: float
    every: int
    first: int = 0
