"""Protocols of a layer's parts. Each kind of part has a spec, which is plain data, and a class that computes it, in one
file.

A spec tells the memory plan its cache and working memory. Its `build` makes the part, which asks the layer's
`WeightFactory` for its weights by name and shape: their only statement, from which `sizes.py` reads sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, Protocol

from penstock.config.model_facts import ActivationSizes, CacheSpec
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.layers.rope import RopeConfig, TemperatureConfig

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.quantization.base import WeightFactory


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
    weighted: bool = True
    """Whether the norm has a weight."""


@dataclass(frozen=True, slots=True)
class Distances(Generic[A]):
    """The learned vectors of distances between tokens, which disentangled attention projects to keys and queries."""

    vectors: A
    """[num_buckets, hidden_size]"""
    buckets: A
    """See `DisentangledOptions`."""


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[A]):
    """A step's inputs that all kinds of layers share."""

    positions: A
    """[num_tokens] int64."""
    angles: Mapping[RopeConfig, A]
    """Cosines and sines at the step's positions, for each of the model's rotary embeddings."""
    temperatures: Mapping[TemperatureConfig, A]
    """[num_tokens, 1] float32: factors on the queries at the step's positions."""
    adapters: AdapterRows | None = None
    """LoRA adapters of the tokens; None: no adapters."""
    position_bias: A | None = None
    """See `AttentionOptions`; None: the model has none."""
    distances: Distances[A] | None = None
    """None: the model has none."""


class Mixer(Protocol[A]):
    """The part of a layer that mixes the tokens of a sequence, such as attention; in two steps."""

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        """`x` [num_tokens, hidden_size] -> the input of `output`, [num_tokens, any]; writes the tokens to `cache`."""
        ...

    def output(self, mixed: A, adapters: AdapterRows | None = None) -> A:
        """[num_tokens, any] -> [num_tokens, hidden_size]; each row depends on its own token and adapter only."""
        ...


class FeedForward(Protocol[A]):
    """The part of a layer that processes each token independently, such as an MLP."""

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        """`x` [num_tokens, hidden_size] -> the same shape; `adapters` are the tokens' LoRA adapters."""
        ...


class PerLayerInput(Protocol[A]):
    """The part of a layer that applies the model's per-layer embedding; processes each token independently."""

    def __call__(self, x: A, inputs: A, adapters: AdapterRows | None = None) -> A:
        """`x` [num_tokens, hidden_size], `inputs` of all layers [num_tokens, any] -> the shape of `x`."""
        ...


class PartSpec(Protocol):
    """The common properties of all specs of parts."""

    @property
    def activation_sizes(self) -> ActivationSizes:
        """Sizes of its intermediate results, for the memory plan."""
        ...

    @property
    def tp_divisor(self) -> int:
        """A number that the number of ranks must divide; 0: any number of ranks works."""
        ...

    def build(self, factory: WeightFactory) -> object:
        """Make the part, whose weights have no content yet."""
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

    def shard(self, tp_size: int) -> MixerSpec:
        """The spec of one rank's shard: its heads and output columns, which determine its cache and working memory.

        `tp_size` must divide `tp_divisor`.
        """
        ...

    def build(self, factory: WeightFactory[A]) -> Mixer[A]: ...


class FeedForwardSpec(PartSpec, Protocol):
    """The spec of a feed-forward part."""

    def shard(self, tp_size: int) -> FeedForwardSpec:
        """See `MixerSpec.shard`."""
        ...

    def build(self, factory: WeightFactory[A]) -> FeedForward[A]: ...


class PerLayerInputSpec(PartSpec, Protocol):
    """The spec of a `PerLayerInput`."""

    def shard(self, tp_size: int) -> PerLayerInputSpec:
        """See `MixerSpec.shard`."""
        ...

    def build(self, factory: WeightFactory[A]) -> PerLayerInput[A]: ...
