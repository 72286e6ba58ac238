"""The specs of MLP layers, gated and plain: plain data, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.feed_forward import Activation
from penstock.config.model_facts import Working
from penstock.layers.spec import FeedForward, MatrixSize, stacked

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class GatedMLPSpec:
    """down(activation(gate(x)) * up(x)). See `FeedForwardSpec` for the methods. The default names are Llama's."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Names within the layer: one per matrix, or a single name if the checkpoint stores them fused."""
    down: str = "mlp.down_proj"

    @property
    def working(self) -> Working:
        return Working(self.intermediate_size, 3 * self.intermediate_size, self.intermediate_size)

    @property
    def num_other_parameters(self) -> int:
        return self.bias * (2 * self.intermediate_size + self.hidden_size)

    @property
    def divided_by(self) -> int:
        return 0

    def share(self, ranks: int) -> "GatedMLPSpec":
        return replace(self, intermediate_size=-(-self.intermediate_size // ranks))

    def matrices(self) -> Iterator[MatrixSize]:
        yield from stacked(self.gate_up, (self.intermediate_size, self.intermediate_size), self.hidden_size)
        yield MatrixSize(self.down, self.hidden_size, self.intermediate_size)

    def build(self, factory: "WeightFactory") -> FeedForward:
        from penstock.layers.linear import GatedMLP  # not above: specs are read before torch

        return GatedMLP(self, factory)


@dataclass(frozen=True, slots=True)
class PlainMLPSpec:
    """down(activation(up(x))). See `FeedForwardSpec` for the methods."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: Activation = "relu2"

    @property
    def working(self) -> Working:
        return Working(self.intermediate_size, 2 * self.intermediate_size, self.intermediate_size)

    @property
    def num_other_parameters(self) -> int:
        return self.bias * (self.intermediate_size + self.hidden_size)

    @property
    def divided_by(self) -> int:
        return 0

    def share(self, ranks: int) -> "PlainMLPSpec":
        return replace(self, intermediate_size=-(-self.intermediate_size // ranks))

    def matrices(self) -> Iterator[MatrixSize]:
        yield MatrixSize(self.up, self.intermediate_size, self.hidden_size)
        yield MatrixSize(self.down, self.hidden_size, self.intermediate_size)

    def build(self, factory: "WeightFactory") -> FeedForward:
        from penstock.layers.linear import PlainMLP  # not above: specs are read before torch

        return PlainMLP(self, factory)
