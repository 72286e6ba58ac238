"""The specs of per-layer embeddings (Gemma 3n and 4): a second, wide token embedding with columns for each layer. Plain
data, no torch.

    inputs = per_layer_norm(projection(embedding)) + table[token]      | layer 0 | layer 1 | ...
    x     += norm_after(projection(activation(gate(x)) * inputs[layer]))
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.feed_forward import Activation
from penstock.config.model_facts import Working
from penstock.layers.spec import MatrixSize, PerLayerInput

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class PerLayerEmbeddingSpec:
    """The wide embedding plus a projection of the usual one: `size` columns per layer."""

    vocab_size: int
    hidden_size: int
    size: int
    num_layers: int
    norm_eps: float
    name: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"

    @property
    def columns(self) -> int:
        """Columns of all layers."""
        return self.num_layers * self.size

    @property
    def table(self) -> MatrixSize:
        return MatrixSize(self.name, self.vocab_size, self.columns)

    @property
    def projection_matrix(self) -> MatrixSize:
        return MatrixSize(self.projection, self.columns, self.hidden_size)


@dataclass(frozen=True, slots=True)
class GatedPerLayerInputSpec:
    """projection(activation(gate(x)) * inputs of the layer). See `PerLayerInputSpec` for the methods."""

    hidden_size: int
    size: int
    first: int
    """The layer's first column of the inputs."""
    columns: int
    """Columns of the inputs of all layers."""
    activation: Activation
    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"

    @property
    def working(self) -> Working:
        total = self.size + 3 * self.columns  # the model's inputs of all layers and their two summands
        return Working(total, total, self.size)

    @property
    def num_other_parameters(self) -> int:
        return 0

    @property
    def divided_by(self) -> int:
        return 0

    def share(self, ranks: int) -> "GatedPerLayerInputSpec":
        return replace(self, size=-(-self.size // ranks))

    def matrices(self) -> Iterator[MatrixSize]:
        yield MatrixSize(self.gate, self.size, self.hidden_size)
        yield MatrixSize(self.projection, self.hidden_size, self.size)

    def build(self, factory: "WeightFactory") -> PerLayerInput:
        from penstock.layers.per_layer import GatedPerLayerInput  # not above: specs are read before torch

        return GatedPerLayerInput(self, factory)
