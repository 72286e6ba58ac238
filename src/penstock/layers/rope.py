"""How a model encodes positions: plain data, no torch. `layers/rotary.py` computes with it."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "frequency_factors", "proportional"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields below `theta` matter only to the types that are named beside them."""

    dim: int
    """How many of a head's elements are rotated."""
    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    """linear, llama3, yarn, proportional: how far the context is stretched."""
    original_max_position: int = 0
    """llama3, yarn, longrope: the context that the model was first trained for."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn."""
    beta_slow: float = 1.0
    """yarn."""
    attention_factor: float | None = None
    """yarn, longrope: scales cosines and sines; None derives it from the factor."""
    mscale: float = 0.0
    """yarn, with `mscale_all_dim`, for the derived attention factor; 0 is none."""
    mscale_all_dim: float = 0.0
    """yarn."""
    truncate: bool = True
    """yarn: round the borders of the ramp to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    """longrope: what each frequency is divided by where no text is longer than the original context."""
    long_factor: tuple[float, ...] = ()
    """longrope: the same where texts may be longer."""
    mscales: tuple[float, float] | None = None
    """longrope: what cosines and sines are multiplied by with the one and the other; None: by `attention_factor`."""
    share: float = 1.0
    """proportional: of the frequencies, those that turn; the others are 0."""
    frequency_factors: tuple[float, ...] = ()
    """frequency_factors: what each frequency is divided by, as GGUF files have it for llama3."""

    def context(self, max_position: int) -> int:
        """Tokens of the longest text, for a model whose config names `max_position`.

        Checkpoints that leave yarn to their users, as Qwen2.5's do, name the context before it is stretched.
        """
        if self.type != "yarn":
            return max_position
        return max(max_position, int(self.original_max_position * self.factor))


@dataclass(frozen=True, slots=True)
class TemperatureConfig:
    """Queries grow with their position p: they are multiplied by 1 + beta * log(1 + floor((p + first) / every))."""

    beta: float
    every: int
    first: int = 0
