"""Protocols of a layer's parts. Each kind of part has a spec, which is plain data without torch, and a class that
computes it.

A spec tells the memory plan and the loader its matrices, other parameters, cache and working memory. Its `build`
allocates the part, without content, from the layer's `WeightFactory`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.config.model_facts import CacheSpec, Working
from penstock.layers.rope import RopeConfig, TemperatureConfig

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.quantization.base import WeightFactory


class MatrixSize(NamedTuple):
    """Name and shape of a layer's matrix."""

    name: str
    """Name in the checkpoint, within the layer, without `.weight`."""
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMS norm, or, with `bias` or `centred`, a layer norm (Ba et al., 2016, arXiv:1607.06450)."""

    name: str
    """Name in the checkpoint, without `.weight`; for a layer's norm, within the layer."""
    size: int
    eps: float
    offset: float = 0.0
    """Added to the weight: 1 if checkpoints store weight - 1."""
    bias: bool = False
    """Whether the norm subtracts the mean first and adds a bias at the end."""
    centred: bool = False
    """Whether the norm subtracts the mean first, even without a bias."""

    @property
    def num_parameters(self) -> int:
        return self.size * (1 + self.bias)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's inputs that all kinds of layers share."""

    positions: "Tensor"
    """[num_tokens] int64."""
    angles: "Mapping[RopeConfig, Tensor]"
    """Cosines and sines at the step's positions, for each of the model's rotary embeddings."""
    temperatures: "Mapping[TemperatureConfig, Tensor]"
    """[num_tokens, 1] float32: factors on the queries at the step's positions."""
    adapters: "AdapterRows | None" = None
    """LoRA adapters of the tokens; None: no adapters."""


class Mixer(Protocol):
    """The part of a layer that mixes the tokens of a sequence, such as attention; in two steps."""

    def mix(self, x: "Tensor", step: StepInputs, batch: "Batch", cache: "AnyCache | None") -> "Tensor":
        """`x` [num_tokens, hidden_size] -> the input of `output`, [num_tokens, any]; writes the tokens to `cache`."""
        ...

    def output(self, mixed: "Tensor", adapters: "AdapterRows | None" = None) -> "Tensor":
        """[num_tokens, any] -> [num_tokens, hidden_size]; each row depends on its own token and adapter only."""
        ...


class FeedForward(Protocol):
    """The part of a layer that processes each token independently, such as an MLP."""

    def __call__(self, x: "Tensor", adapters: "AdapterRows | None" = None) -> "Tensor":
        """`x` [num_tokens, hidden_size] -> the same shape; `adapters` are the tokens' LoRA adapters."""
        ...


class PerLayerInput(Protocol):
    """The part of a layer that applies the model's per-layer embedding; processes each token independently."""

    def __call__(self, x: "Tensor", inputs: "Tensor") -> "Tensor":
        """`x` [num_tokens, hidden_size], `inputs` of all layers [num_tokens, any] -> the shape of `x`."""
        ...


class PartSpec(Protocol):
    """The common properties of all specs of parts."""

    @property
    def working(self) -> Working:
        """Working memory: the size of its intermediate results."""
        ...

    @property
    def num_other_parameters(self) -> int:
        """Number of weight elements that are not in `matrices`: biases, norms."""
        ...

    @property
    def divided_by(self) -> int:
        """A number that the number of ranks must divide; 0: any number of ranks works."""
        ...

    def matrices(self) -> Iterator[MatrixSize]:
        """Its matrices, as stored in the checkpoint."""
        ...


class MixerSpec(PartSpec, Protocol):
    """The spec of a mixer."""

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary embedding whose angles the mixer needs."""
        ...

    @property
    def cache(self) -> CacheSpec | None:
        """The layer's cache: what it stores of a sequence."""
        ...

    def share(self, ranks: int) -> "MixerSpec":
        """The spec of one rank's shard: its heads and output columns.

        `ranks` must divide `divided_by`. The matrices have the number of elements of the rank's shards, but may have
        another shape.
        """
        ...

    def build(self, factory: "WeightFactory") -> Mixer:
        """Allocate the mixer, without content."""
        ...


class FeedForwardSpec(PartSpec, Protocol):
    """The spec of a feed-forward part."""

    def share(self, ranks: int) -> "FeedForwardSpec":
        """See `MixerSpec.share`."""
        ...

    def build(self, factory: "WeightFactory") -> FeedForward:
        """Allocate the part, without content."""
        ...


class PerLayerInputSpec(PartSpec, Protocol):
    """The spec of a `PerLayerInput`."""

    def share(self, ranks: int) -> "PerLayerInputSpec":
        """See `MixerSpec.share`."""
        ...

    def build(self, factory: "WeightFactory") -> PerLayerInput:
        """Allocate the part, without content."""
        ...


def stacked(names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Iterator[MatrixSize]:
    """One matrix per name; a single name stands for a fused matrix of all rows."""
    for name, count in zip(names, rows if len(names) > 1 else (sum(rows),), strict=True):
        yield MatrixSize(name, count, columns)
