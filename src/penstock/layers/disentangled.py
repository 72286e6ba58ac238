"""Disentangled attention (DeBERTa): scores also depend on the distance of key and query, by their content.

Distances share buckets, each with a learned vector, which all layers share. A layer projects these vectors to keys and
queries of distances: the products of queries with the former and of keys with the latter are added to the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from penstock.config.model_facts import ActivationSizes
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.disentangled import DisentangledOptions
from penstock.layers.encoder_head import wide
from penstock.layers.linear import Linear, output_linear
from penstock.layers.norm import Norm
from penstock.layers.spec import Distances, Mixer, NormSpec, StepInputs

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory

_QKV = ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
_OUTPUT = "attention.output.dense"
_OF_DISTANCES = ("attention.self.pos_key_proj", "attention.self.pos_query_proj")
_VECTOR = 16
"""The number of buckets that the kernel takes is a multiple of this; the others are not used."""


@dataclass(frozen=True, slots=True)
class DistanceSpec:
    """The learned vectors of distances.

    A distance of up to half of `span` has a bucket of its own; those beyond, up to `max_distance`, share buckets whose
    ranges grow with the logarithm.
    """

    name: str
    """In the checkpoint, without `.weight`."""
    size: int
    """Of a vector."""
    span: int
    """Half the number of vectors: those of distances from -span to span - 1, the ends for all beyond."""
    max_distance: int | None
    """None: each distance has a bucket of its own."""
    norm: NormSpec | None
    """Norm of the vectors."""


@dataclass(frozen=True, slots=True)
class DisentangledSpec:
    """Attention within whole texts, with biases. See `MixerSpec` for the methods."""

    hidden_size: int
    num_heads: int
    head_dim: int
    scale: float
    """Factor on the scores."""
    num_buckets: int
    """Number of vectors of distances."""
    has_keys: bool
    """Whether queries are multiplied with keys of distances (c2p, content to position)."""
    has_queries: bool
    """Whether keys are multiplied with queries of distances (p2c)."""
    shares_projections: bool
    """Whether vectors of distances are projected as tokens are, instead of by matrices of their own."""

    @property
    def rope(self) -> None:
        return None

    @property
    def cache(self) -> None:
        return None

    @property
    def size(self) -> int:
        """Columns of the queries, and of the keys and values."""
        return self.num_heads * self.head_dim

    @property
    def table_elements(self) -> int:
        """Elements of the keys and queries of distances."""
        return (self.has_keys + self.has_queries) * self.size * _padded(self.num_buckets)

    @property
    def activation_sizes(self) -> ActivationSizes:
        columns = 4 * self.size  # queries, keys, values and the output
        return ActivationSizes(columns, 2 * columns + 4 * self.num_buckets, self.size)

    @property
    def tp_divisor(self) -> int:
        return 1  # encoders are computed by one process

    def shard(self, tp_size: int) -> DisentangledSpec:
        return self

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return DisentangledAttention(self, factory)


class DistanceVectors(Generic[A]):
    """The vectors of distances and the buckets. The loader fills the weights."""

    def __init__(self, spec: DistanceSpec, max_positions: int, factory: WeightFactory[A]) -> None:
        """
        Args:
            max_positions: most tokens of a text.
        """
        self._table = factory.tensor(f"{spec.name}.weight", 2 * spec.span, spec.size)
        self._norm = None if spec.norm is None else Norm(spec.norm, factory)
        self._buckets = factory.constant(buckets(spec, max_positions))

    def __call__(self) -> Distances[A]:
        """What each layer projects."""
        return Distances(self._table if self._norm is None else self._norm(self._table), self._buckets)


def buckets(spec: DistanceSpec, num_distances: int) -> NDArray[np.int32]:
    """The buckets of the distances from -num_distances to num_distances - 1."""
    distances: NDArray[Any] = np.arange(-num_distances, num_distances)
    if spec.max_distance is not None:
        middle = spec.span // 2
        # In float32, as in `transformers`, so that roundings put distances into the same buckets.
        size = np.abs(distances).astype(np.float32)
        growth = np.log(np.maximum(size, middle) / np.float32(middle))
        growth = growth / np.log(np.float32((spec.max_distance - 1) / middle)) * np.float32(middle - 1)
        distances = np.where(size <= middle, distances, (np.ceil(growth) + middle) * np.sign(distances))
    found: NDArray[np.int32] = np.clip(distances + spec.span, 0, 2 * spec.span - 1).astype(np.int32)
    return found


def _padded(num_buckets: int) -> int:
    return -(-num_buckets // _VECTOR) * _VECTOR


class DisentangledAttention(Generic[A]):
    """See `DisentangledSpec` and `Mixer`."""

    def __init__(self, spec: DisentangledSpec, factory: WeightFactory[A]) -> None:
        hidden, size = spec.hidden_size, spec.size
        self._spec, self._ops, self._constant = spec, factory.ops, factory.constant
        self._qkv = Linear(_QKV, hidden, (size,) * 3, factory, bias=True)
        self.output = output_linear(_OUTPUT, size, hidden, factory, bias=True)
        self._of_distances = None
        names = [name for name, has in zip(_OF_DISTANCES, (spec.has_keys, spec.has_queries), strict=True) if has]
        if names and not spec.shares_projections:
            sizes = (size,) * len(names)
            self._of_distances = Linear(tuple(names), hidden, sizes, factory, bias=True, adaptable=False)
        self._options: DisentangledOptions[A] | None = None
        """Made of the weights in the first step."""

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        if self._options is None:
            assert step.distances is not None
            self._options = self._made(step.distances)
        return self._ops.disentangled_attention(self._qkv(x, step.adapters), self._options, batch)

    def _made(self, distances: Distances[A]) -> DisentangledOptions[A]:
        spec, own = self._spec, self._of_distances
        made = wide((self._qkv if own is None else own)(distances.vectors), self._ops)
        parts = self._ops.on_host(made).reshape(spec.num_buckets, -1, spec.num_heads, spec.head_dim)
        queries, keys = (0, 1) if own is None else (parts.shape[1] - 1, 0)
        return DisentangledOptions(
            spec.num_heads,
            spec.scale,
            self._by_head(parts[:, keys]) if spec.has_keys else None,
            self._by_head(parts[:, queries]) if spec.has_queries else None,
            distances.buckets,
        )

    def _by_head(self, vectors: NDArray[np.float32]) -> A:
        """`vectors` [num_buckets, num_heads, head_dim] -> [num_heads, head_dim, num_buckets], padded."""
        num_buckets, *of_one = vectors.shape
        table = np.zeros((*of_one, _padded(num_buckets)), np.float32)
        table[..., :num_buckets] = vectors.transpose(1, 2, 0)
        return self._constant(table)
