"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING, Generic

import numpy as np

from penstock.config.model_facts import ActivationSizes, KVSpec, SharedKV
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.attention import AttentionOptions, HeadNorms, RopeOptions
from penstock.kernels.elementwise import Columns
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.clipped import ClippedLinear
from penstock.layers.linear import Linear, output_linear
from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.spec import Mixer, StepInputs
from penstock.quantization.rows import RowRun

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Names of the weights in the checkpoint, within the layer; the defaults are Llama's."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name per matrix, or a single name if the checkpoint stores them fused."""
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    """The complete name of the tensor within the layer."""
    gates: str = "self_attn.gate_proj"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over keys and values. See `MixerSpec` for the methods."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores, usually `head_dim ** -0.5`."""
    rope: RopeConfig | None
    """None: no rotary position embedding (NoPE)."""
    window: int | None = None
    """Sliding window: number of keys that a query attends to, its own included; None: full attention."""
    chunk: int | None = None
    """Chunked attention: tokens per chunk; a query attends to the keys of its own chunk. None: no chunks."""
    qkv_bias: bool = False
    key_bias: bool = True
    """Whether the keys have a bias, if `qkv_bias`."""
    output_bias: bool = False
    qk_norm_eps: float | None = None
    """Epsilon of the RMS norms of queries and keys; None: no such norms."""
    qk_norm_whole: bool = False
    """Whether those norms are computed over all heads together instead of over each head."""
    qk_norm_offset: float = 0.0
    """The norms' `NormSpec.offset`."""
    qk_norm_weight: bool = True
    """Whether the norms have weights."""
    qk_norm_last: bool = False
    """Whether the norms of heads are applied after RoPE."""
    qkv_clip: float | None = None
    """Limit on the size of the elements of queries, keys and values, after norms over all heads and before RoPE."""
    value_norm: bool = False
    """Whether each value head is normalized by its root mean square, too; needs `qk_norm_eps`."""
    value_is_key: bool = False
    """Whether the values are the projected keys, before norm and RoPE, so that there is no value projection."""
    shared: int | None = None
    """Index of the layer whose KV cache this layer reads; None: the layer has its own keys and values."""
    interleaved_rope: bool = False
    """Whether RoPE rotates pairs of adjacent elements instead of elements half a head apart."""
    temperature: TemperatureConfig | None = None
    """Position-dependent factor on the queries."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap)."""
    sinks: bool = False
    """Attention sinks: each head has a learned score that takes part in the softmax without a key."""
    bidirectional: bool = False
    """Whether queries also attend to later keys, `window` to each side; only for texts computed whole."""
    clipped: bool = False
    """Whether the inputs and outputs of the projections are limited; see `ClippedLinear`."""
    joins_images: bool = False
    """Whether an image's tokens attend to each other, also to later ones."""
    qkv_by_head: bool = False
    """Whether the fused matrix has each key head with its queries and value, instead of all queries first."""
    qkv_adaptable: bool = True
    """Whether adapters can target the projections; some GGUF files have their rows in another order than adapters."""
    output_gate: bool = False
    """Whether the query projection also yields a gate after each head, whose sigmoid scales the head's output."""
    head_gates: bool = False
    """Whether a projection yields one number a head, whose sigmoid scales the head's output."""
    column_gates: bool = False
    """Whether it yields one number for each column of the output instead."""
    names: AttentionNames = field(default_factory=AttentionNames)

    @classmethod
    def multi_head(cls, hidden_size: int, num_heads: int) -> "AttentionSpec":
        """Attention whose heads have their own keys and share the hidden size, without rotary positions."""
        head_dim = hidden_size // num_heads
        return cls(hidden_size, num_heads, num_heads, head_dim, head_dim**-0.5, rope=None)

    @property
    def parts(self) -> int:
        """Number of projections among query, key and value: 1 to 3."""
        return 1 if self.shared is not None else 2 if self.value_is_key else 3

    @property
    def sizes(self) -> tuple[int, ...]:
        """Output columns of the existing query (with gates, if any), key and value projections."""
        key = self.num_kv_heads * self.head_dim
        return (self.query_size * (1 + self.output_gate), key, key)[: self.parts]

    @property
    def qkv_names(self) -> tuple[str, ...]:
        """Names of the existing query, key and value projections."""
        return self.names.qkv[: self.parts]

    @property
    def biases(self) -> bool | tuple[bool, ...]:
        """Whether those projections have biases, or whether each has one."""
        return self.qkv_bias if self.key_bias or not self.qkv_bias else (True, False, True)[: self.parts]

    @property
    def query_size(self) -> int:
        """Columns of the queries and of the attention output."""
        return self.num_heads * self.head_dim

    @property
    def norm_sizes(self) -> tuple[int, ...]:
        """Sizes of the query norm and, if the layer has its own keys, of the key norm."""
        if self.qk_norm_whole:
            return (self.query_size, *self.sizes[1:2])
        return (self.head_dim,) * min(2, self.parts)

    @property
    def cache(self) -> KVSpec | SharedKV:
        if self.shared is not None:
            return SharedKV(self.shared)
        return KVSpec(self.num_kv_heads, self.head_dim, self.chunk or self.window)

    @property
    def activation_sizes(self) -> ActivationSizes:
        columns = 2 * sum(self.sizes)  # queries, keys and values, and the attention output, which is no wider
        columns += 3 * self.query_size if self.head_gates or self.column_gates else 0
        return ActivationSizes(columns, columns, self.query_size)

    @property
    def tp_divisor(self) -> int:
        return math.gcd(self.num_heads, self.num_kv_heads)

    def shard(self, tp_size: int) -> AttentionSpec:
        return replace(self, num_heads=self.num_heads // tp_size, num_kv_heads=self.num_kv_heads // tp_size)

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return Attention(self, factory)


class Attention(Generic[A]):
    """Projects to queries, keys and values, applies RoPE, writes the KV cache and attends. See `Mixer`."""

    def __init__(self, spec: AttentionSpec, factory: WeightFactory[A]) -> None:
        self._all, self._spec, self._ops = spec, spec.shard(factory.ranks.size), factory.ops
        names, hidden = spec.names, spec.hidden_size
        self.qkv: Linear[A] | ClippedLinear[A]
        self.output: Linear[A] | ClippedLinear[A]
        if spec.clipped:
            self.qkv = ClippedLinear(spec.qkv_names, hidden, spec.sizes, factory)
            self.output = ClippedLinear((names.output,), spec.query_size, (hidden,), factory)
        else:
            self.qkv = Linear(
                spec.qkv_names, hidden, spec.sizes, factory, bias=spec.biases, adaptable=spec.qkv_adaptable
            )
            # On loading, once: kernels expect all queries, then all keys, then all values.
            if spec.qkv_by_head:
                factory.reorder_rows(names.qkv[0], tuple(_by_part(spec)))
            self.output = output_linear(names.output, spec.query_size, hidden, factory, bias=spec.output_bias)
        self._gates = None
        if spec.head_gates or spec.column_gates:
            columns = spec.query_size if spec.column_gates else spec.num_heads
            self._gates = Linear((names.gates,), hidden, (columns,), factory, bias=False)
        self._norms = None if spec.qk_norm_eps is None else _head_norms(spec, spec.qk_norm_eps, factory)
        own, whole = self._spec, spec.qk_norm_whole
        self._rope = RopeOptions(
            own.num_heads,
            None if whole else self._norms,
            parts=spec.parts,
            value_norm=spec.value_norm,
            gated=spec.output_gate,
            interleaved=spec.interleaved_rope,
        )
        self._attention = AttentionOptions(
            own.num_heads,
            spec.scale,
            window=spec.window,
            chunk=spec.chunk,
            soft_cap=spec.soft_cap,
            sinks=factory.float32(names.sinks, spec.num_heads) if spec.sinks else None,
            gated=spec.output_gate,
            bidirectional=spec.bidirectional,
            takes_ends=spec.joins_images,
        )

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        assert cache is not None
        assert not isinstance(cache, StateCache), "the cache of another kind of layer"
        spec = self._spec
        qkv, norms = self.qkv(x, step.adapters), self._norms
        if norms is not None and spec.qk_norm_whole:
            assert norms.key is not None, "such a layer has keys of its own"
            # Not part of `rope_and_cache`, which sees the heads of one rank, one by one.
            self._norm_whole(qkv, 0, self._all.sizes[0], norms.query, norms.eps)
            self._norm_whole(qkv, spec.sizes[0], self._all.sizes[1], norms.key, norms.eps)
        if spec.qkv_clip is not None:
            qkv = self._ops.activate(qkv, "clip", divisor=spec.qkv_clip, factor=spec.qkv_clip)
        query = cache.rope_and_cache(
            qkv,
            self._rope,
            None if spec.rope is None else step.angles[spec.rope],
            batch,
            query_factors=None if spec.temperature is None else step.temperatures[spec.temperature],
        )
        options = self._attention
        # Of the step's tables: one bias serves all layers.
        if step.position_bias is not None:
            options = replace(options, position_bias=step.position_bias)
        seen = cache.attend(query, options, batch)
        if self._gates is not None:
            query = self._spread(self._gates(x, step.adapters))
        elif not spec.output_gate:
            return seen
        return self._ops.head_gates(seen, query, spec.num_heads)

    def _spread(self, gates: A) -> A:
        """`gates` [num_tokens, num_heads, or columns] -> [num_tokens, num_heads * 2 * head_dim], as `Ops.head_gates`
        takes them: in the second half of each head.
        """
        spec, size = self._spec, self._spec.head_dim
        spread = self._ops.empty_rows(gates, (2 * spec.query_size,), gates.dtype)
        if spec.column_gates:
            by_column = Columns(0, size, size, heads=spec.num_heads, step=size, to_step=2 * size)
            self._ops.copy_columns(gates, spread, by_column)
            return spread
        for head in range(spec.num_heads):
            columns = Columns(head, (2 * head + 1) * size, 1, heads=size, step=0, to_step=1)
            self._ops.copy_columns(gates, spread, columns)
        return spread

    def _norm_whole(self, qkv: A, first: int, total: int, weight: A, eps: float) -> None:
        """Normalize the queries, or the keys, over all heads of all ranks, in place.

        Args:
            first: the first of this rank's columns in `qkv`.
            total: number of columns of all ranks.
        """
        ops = self._ops
        if ops.collective.ranks.size == 1:
            ops.rms_norm_columns(qkv, first, weight, eps)
            return
        own = ops.collective.ranks.own(total)
        mine = ops.empty_rows(qkv, (len(own),), qkv.dtype)
        ops.copy_columns(qkv, mine, Columns(first, 0, len(own)))
        # Columns are gathered rather than squares summed: a sum would depend on the number of ranks.
        whole = ops.collective.columns(mine, total)
        ops.rms_norm_columns(whole, 0, weight, eps)
        ops.copy_columns(whole, qkv, Columns(own.start, first, len(own)))


def _by_part(spec: AttentionSpec) -> Iterator[RowRun]:
    """Moves of rows from the checkpoint's order, by head, to all queries, keys and values."""
    size, share = spec.head_dim, spec.num_heads // spec.num_kv_heads
    for head in range(spec.num_kv_heads):
        source = head * (share + 2)
        yield RowRun(source * size, head * share * size, share * size)
        for part in range(2):
            yield RowRun(
                (source + share + part) * size, (spec.num_heads + part * spec.num_kv_heads + head) * size, size
            )


def _head_norms(spec: AttentionSpec, eps: float, factory: WeightFactory[A]) -> HeadNorms[A]:
    """The norms of queries and keys, or of queries only if the layer shares the keys of another."""
    names = (spec.names.query_norm, spec.names.key_norm)
    weights = [
        factory.norm(name, size, spec.qk_norm_offset)
        if spec.qk_norm_weight
        else factory.constant(np.ones(size, np.float32))
        for name, size in zip(names, spec.norm_sizes, strict=False)
    ]
    return HeadNorms(weights[0], weights[1] if spec.parts > 1 else None, eps, spec.qk_norm_last)
