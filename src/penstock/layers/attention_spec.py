"""The spec of an attention layer: plain data, no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.config.model_facts import KVSpec, SharedKV, Working
from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.spec import MatrixSize, Mixer, stacked

if TYPE_CHECKING:
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
    output_bias: bool = False
    qk_norm_eps: float | None = None
    """Epsilon of the RMS norms of queries and keys; None: no such norms."""
    qk_norm_whole: bool = False
    """Whether those norms are computed over all heads together instead of over each head."""
    qk_norm_offset: float = 0.0
    """The norms' `NormSpec.offset`."""
    qk_norm_weight: bool = True
    """Whether the norms have weights."""
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
    output_gate: bool = False
    """Whether the query projection also yields a gate after each head, whose sigmoid scales the head's output."""
    names: AttentionNames = field(default_factory=AttentionNames)

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
    def working(self) -> Working:
        columns = 2 * sum(self.sizes)  # queries, keys and values, and the attention output, which is no wider
        return Working(columns, columns, self.query_size)

    @property
    def num_other_parameters(self) -> int:
        norms = sum(self.norm_sizes) * (self.qk_norm_eps is not None and self.qk_norm_weight)
        biases = sum(self.sizes) * self.qkv_bias + self.hidden_size * self.output_bias
        return biases + norms + self.num_heads * self.sinks

    @property
    def divided_by(self) -> int:
        return math.gcd(self.num_heads, self.num_kv_heads)

    def share(self, ranks: int) -> "AttentionSpec":
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=self.num_kv_heads // ranks)

    def matrices(self) -> Iterator[MatrixSize]:
        yield from stacked(self.qkv_names, self.sizes, self.hidden_size)
        yield MatrixSize(self.names.output, self.hidden_size, self.query_size)

    def build(self, factory: "WeightFactory") -> Mixer:
        from penstock.layers.attention import Attention  # not above: specs are read before torch

        return Attention(self, factory)
