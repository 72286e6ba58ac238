"""The spec of LFM2's gated short convolution: plain data, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.model_facts import StateSpec, Working
from penstock.layers.spec import MatrixSize, Mixer

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """C * conv(B * x), where B, C and x are projections of the hidden states. See `MixerSpec` for the methods."""

    hidden_size: int
    kernel: int
    """Width of the convolution in tokens."""
    bias: bool = False
    """Whether the projections and the convolution have biases."""
    input: str = "conv.in_proj"
    conv: str = "conv.conv"
    output: str = "conv.out_proj"
    ranks: int = 1
    """Number of ranks that share the channels."""

    @property
    def own_size(self) -> int:
        """Number of channels of one rank."""
        return self.hidden_size // self.ranks

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> StateSpec:
        return StateSpec(((self.kernel - 1, self.own_size),))

    @property
    def working(self) -> Working:
        return Working(4 * self.hidden_size, 20 * self.hidden_size, self.hidden_size)

    @property
    def num_other_parameters(self) -> int:
        return self.hidden_size * (self.kernel + 5 * self.bias)

    @property
    def divided_by(self) -> int:
        return self.hidden_size

    def share(self, ranks: int) -> "ShortConvSpec":
        return replace(self, ranks=ranks)

    def matrices(self) -> Iterator[MatrixSize]:
        yield MatrixSize(self.input, 3 * self.own_size, self.hidden_size)
        yield MatrixSize(self.output, self.own_size, self.hidden_size)

    def build(self, factory: "WeightFactory") -> Mixer:
        from penstock.layers.short_conv import ShortConv  # not above: specs are read before torch

        return ShortConv(self, factory)
