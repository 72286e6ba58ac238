"""What a layer's parts say of themselves: plain data, no torch. A kind of part is a spec, and a class that computes it.

A spec answers what the memory plan and the loader ask (matrices, other parameters, what is kept of a sequence, room for
intermediate results), and `build` makes the part, without content, from a `WeightFactory` that stands at the layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.model_facts import CacheSpec, Working

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.quantization.base import WeightFactory


class MatrixSize(NamedTuple):
    """A matrix of a layer."""

    name: str
    """In the checkpoint, within the layer, without `.weight`."""
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Normalisation of the hidden states: by their root mean square, or with a `bias` by their deviation."""

    name: str
    """In the checkpoint, without `.weight`; that of a layer's norm within the layer."""
    size: int
    eps: float
    offset: float = 0.0
    """What the weight gets added: 1 where checkpoints hold its distance from 1."""
    bias: bool = False
    """The mean is taken off first, and a bias added in the end (Ba et al., 2016, arXiv:1607.06450)."""
    centred: bool = False
    """The mean is taken off first without a bias, too."""

    @property
    def num_parameters(self) -> int:
        return self.size * (1 + self.bias)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What every layer of a step gets, whatever its kind."""

    positions: "Tensor"
    """[num_tokens] int64."""
    angles: "Mapping[RopeConfig, Tensor]"
    """Cosines and sines of the step's positions, of each rotary embedding that the model has."""
    temperatures: "Mapping[TemperatureConfig, Tensor]"
    """[num_tokens, 1] float32: what queries at the step's positions are multiplied by."""
    adapters: "AdapterRows | None" = None
    """Those that the tokens have; None: there are no adapters."""


class Mixer(Protocol):
    """The part of a layer in which tokens see others of their sequence, in two steps."""

    def mix(self, x: "Tensor", step: StepInputs, batch: "Batch", cache: "AnyCache | None") -> "Tensor":
        """`x` [num_tokens, hidden_size] -> what `output` projects back, [num_tokens, any].

        What the layer keeps of the step's tokens is in `cache` then.
        """
        ...

    def output(self, mixed: "Tensor", adapters: "AdapterRows | None" = None) -> "Tensor":
        """[num_tokens, any] -> [num_tokens, hidden_size]; concerns each token alone, and its adapter."""
        ...


class FeedForward(Protocol):
    """The part of a layer that concerns each token alone."""

    def __call__(self, x: "Tensor", adapters: "AdapterRows | None" = None) -> "Tensor":
        """`x` [num_tokens, hidden_size], whose tokens have these adapters -> the same shape."""
        ...


class PerLayerInput(Protocol):
    """The part of a layer that adds what the model's per-layer embedding has for it; concerns each token alone."""

    def __call__(self, x: "Tensor", inputs: "Tensor") -> "Tensor":
        """`x` [num_tokens, hidden_size], `inputs` [num_tokens, any], of all layers -> the shape of `x`."""
        ...


class PartSpec(Protocol):
    """What mixers and feed-forward parts have in common."""

    @property
    def working(self) -> Working:
        """Room that its intermediate results take."""
        ...

    @property
    def num_other_parameters(self) -> int:
        """Elements of its weights that are not in `matrices`: biases, norms."""
        ...

    @property
    def divided_by(self) -> int:
        """What a number of ranks must divide; 0: any will do."""
        ...

    def matrices(self) -> Iterator[MatrixSize]:
        """Its matrices, as the checkpoint has them."""
        ...


class MixerSpec(PartSpec, Protocol):
    """A mixer as plain data."""

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary positions that it is given the angles of."""
        ...

    @property
    def cache(self) -> CacheSpec | None:
        """What the layer keeps of a sequence."""
        ...

    def share(self, ranks: int) -> "MixerSpec":
        """The part as one of so many ranks computes it: its heads, its columns of what the maps give.

        `ranks` divides `divided_by`. Its matrices have as many elements as the rank's, of another shape.
        """
        ...

    def build(self, factory: "WeightFactory") -> Mixer:
        """The mixer, without content."""
        ...


class FeedForwardSpec(PartSpec, Protocol):
    """A feed-forward part as plain data."""

    def share(self, ranks: int) -> "FeedForwardSpec":
        """As `MixerSpec.share`."""
        ...

    def build(self, factory: "WeightFactory") -> FeedForward:
        """The part, without content."""
        ...


class PerLayerInputSpec(PartSpec, Protocol):
    """Such a part as plain data."""

    def share(self, ranks: int) -> "PerLayerInputSpec":
        """As `MixerSpec.share`."""
        ...

    def build(self, factory: "WeightFactory") -> PerLayerInput:
        """The part, without content."""
        ...


def stacked(names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Iterator[MatrixSize]:
    """Matrices of their own, or a single one of all rows where there is one name."""
    for name, count in zip(names, rows if len(names) > 1 else (sum(rows),), strict=True):
        yield MatrixSize(name, count, columns)
