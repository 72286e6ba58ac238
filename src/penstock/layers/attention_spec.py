"""Attention over keys and values, as plain data. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.layers.rope import RopeConfig
from penstock.layers.spec import MatrixSize, Mixer, stacked
from penstock.memory import KVSpec, Working

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


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions. See `MixerSpec` for the methods."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """On the scores: usually `head_dim ** -0.5`."""
    rope: RopeConfig
    window: int | None = None
    """How many keys a query sees, its own included; None: all."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    """Normalise each head of the queries and keys with this epsilon; None: do not."""
    names: AttentionNames = field(default_factory=AttentionNames)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Columns of the queries, keys and values."""
        key = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, key, key

    @property
    def cache(self) -> KVSpec:
        return KVSpec(self.num_kv_heads, self.head_dim, self.window)

    @property
    def working(self) -> Working:
        columns = 2 * sum(self.sizes)  # queries, keys and values; and what the queries see, which is no wider
        return Working(columns, columns, self.sizes[0])

    @property
    def num_other_parameters(self) -> int:
        norms = 2 * self.head_dim * (self.qk_norm_eps is not None)
        return sum(self.sizes) * self.qkv_bias + self.hidden_size * self.output_bias + norms

    def matrices(self) -> Iterator[MatrixSize]:
        yield from stacked(self.names.qkv, self.sizes, self.hidden_size)
        yield MatrixSize(self.names.output, self.hidden_size, self.sizes[0])

    def build(self, factory: "WeightFactory") -> Mixer:
        from penstock.layers.attention import Attention  # here, not above: the server process has no torch

        return Attention(self, factory)
