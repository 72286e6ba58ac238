"""Attention over keys and values, as plain data. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.spec import MatrixSize, Mixer, stacked
from penstock.model_facts import KVSpec, SharedKV, Working

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """What the checkpoint calls the parts, within the layer; the defaults are Llama's."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name a matrix, or a single one where the checkpoint has them as one."""
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    """The whole name of the tensor."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention over keys and values. See `MixerSpec` for the methods."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """On the scores: usually `head_dim ** -0.5`."""
    rope: RopeConfig | None
    """None: positions turn nothing."""
    window: int | None = None
    """How many keys a query sees, its own included; None: all."""
    chunk: int | None = None
    """Texts are in pieces of so many tokens, and a query sees the keys of its own piece; None: they are whole."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    """Normalise the queries and keys with this epsilon; None: do not."""
    qk_norm_whole: bool = False
    """All heads of the queries together, and all of the keys, instead of each head."""
    qk_norm_offset: float = 0.0
    """As that of `NormSpec`."""
    qk_norm_weight: bool = True
    """Whether the norms have weights."""
    value_norm: bool = False
    """Each head of the values is divided by its root mean square, where queries and keys are normalised."""
    value_is_key: bool = False
    """The values are what the map to the keys gives."""
    shared: int | None = None
    """The layer, by its index, whose keys and values these queries see; None: the layer has its own."""
    interleaved_rope: bool = False
    """Positions turn pairs of elements that lie beside each other, not those half a head apart."""
    temperature: TemperatureConfig | None = None
    """What the queries are multiplied by."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap)."""
    sinks: bool = False
    """Each head has a score of its own that no key has, and which takes its share of the weights."""
    bidirectional: bool = False
    """Queries see the keys after their own, too, `window` of them to each side; only of whole texts."""
    output_gate: bool = False
    """The map to the queries gives a gate, too, behind each head: what the head sees is multiplied by its sigmoid."""
    names: AttentionNames = field(default_factory=AttentionNames)

    @property
    def parts(self) -> int:
        """How many of queries, keys and values are mapped to."""
        return 1 if self.shared is not None else 2 if self.value_is_key else 3

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns that the maps to queries (with gates, if any), keys and values give, of those that there are."""
        key = self.num_kv_heads * self.head_dim
        return (self.query_size * (1 + self.output_gate), key, key)[: self.parts]

    @property
    def qkv_names(self) -> tuple[str, ...]:
        """Names of the maps, of those that there are."""
        return self.names.qkv[: self.parts]

    @property
    def query_size(self) -> int:
        """Columns of the queries, and of what they see."""
        return self.num_heads * self.head_dim

    @property
    def norm_sizes(self) -> tuple[int, ...]:
        """Elements of the norms of queries and, where the layer has its own, of keys."""
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
        columns = 2 * sum(self.sizes)  # queries, keys and values; and what the queries see, which is no wider
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
        from penstock.layers.attention import Attention  # here, not above: the server process has no torch

        return Attention(self, factory)
