"""The gated short convolution of LFM2, as plain data. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.layers.spec import MatrixSize, Mixer
from penstock.model_facts import StateSpec, Working

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """C * conv(B * x), where B, C and x are projections of the hidden states. See `MixerSpec` for the methods."""

    hidden_size: int
    kernel: int
    """Tokens that a result depends on."""
    bias: bool = False
    """Of the projections and of the convolution."""
    input: str = "conv.in_proj"
    conv: str = "conv.conv"
    output: str = "conv.out_proj"
    ranks: int = 1
    """That the channels are divided among."""

    @property
    def own_size(self) -> int:
        """Channels of a rank."""
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
        from penstock.layers.short_conv import ShortConv  # here, not above: the server process has no torch

        return ShortConv(self, factory)
