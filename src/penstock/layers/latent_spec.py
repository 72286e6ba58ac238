"""The spec of multi-head latent attention: plain data, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.config.model_facts import KVSpec, Working
from penstock.layers.rope import RopeConfig
from penstock.layers.spec import MatrixSize, Mixer

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of the weights in the checkpoint, within the layer; the defaults are DeepSeek's."""

    query: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    heads: str = "self_attn.kv_b_proj"
    output: str = "self_attn.o_proj"


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (MLA; DeepSeek-AI, 2024, arXiv:2405.04434). See `MixerSpec` for the methods.

    Keys and values are linear maps of a latent vector per token, and are never computed: queries are mapped to the
    latent space instead, and the attention output is mapped from there to values. The cache entry of a token is the
    rotated part of its key, which all heads share, and the latent. It is stored as one KV head whose keys are also its
    values.
    """

    hidden_size: int
    num_heads: int
    rank: int
    """Size of a latent (`kv_lora_rank`)."""
    key_dim: int
    """Elements of a head's key that come from the latent (`qk_nope_head_dim`)."""
    value_dim: int
    rope: RopeConfig
    """RoPE on `rope.dim` further elements of queries and keys (`qk_rope_head_dim`)."""
    scale: float
    query_rank: int | None = None
    """Size of the normalized low-rank input of the query projection (`q_lora_rank`); None: full rank."""
    paired: bool = True
    """Whether the checkpoint has the rotated elements in adjacent pairs: x0 y0 x1 y1 .."""
    bias: bool = False
    """Whether the projections of hidden states have biases, except a full-rank query projection."""
    norm_eps: float = 1e-6
    names: LatentNames = field(default_factory=LatentNames)

    @property
    def width(self) -> int:
        """Elements of a token's cache entry."""
        return self.rope.dim + self.rank

    @property
    def query_size(self) -> int:
        return self.num_heads * (self.key_dim + self.rope.dim)

    @property
    def cache(self) -> KVSpec:
        return KVSpec(1, self.width, latent=True)

    @property
    def working(self) -> Working:
        columns = (2 * self.num_heads + 1) * self.width + self.query_size + (self.query_rank or 0) * 2
        values = self.num_heads * self.value_dim
        total = columns + 2 * self.width + values
        return Working(total, total, max(values, self.query_rank or 0))

    @property
    def num_other_parameters(self) -> int:
        biases = ((self.query_rank or 0) + self.width + self.hidden_size) * self.bias
        return self.rank + (self.query_rank or 0) + biases

    @property
    def divided_by(self) -> int:
        return self.num_heads

    def share(self, ranks: int) -> "LatentAttentionSpec":
        return replace(self, num_heads=self.num_heads // ranks)

    def matrices(self) -> Iterator[MatrixSize]:
        names = self.names
        if self.query_rank is None:
            yield MatrixSize(names.query, self.query_size, self.hidden_size)
        else:
            yield MatrixSize(names.query_down, self.query_rank, self.hidden_size)
            yield MatrixSize(names.query_up, self.query_size, self.query_rank)
        yield MatrixSize(names.latent, self.width, self.hidden_size)
        yield MatrixSize(names.heads, self.num_heads * (self.key_dim + self.value_dim), self.rank)
        yield MatrixSize(names.output, self.hidden_size, self.num_heads * self.value_dim)

    def build(self, factory: "WeightFactory") -> Mixer:
        from penstock.layers.latent import LatentAttention  # not above: specs are read before torch

        return LatentAttention(self, factory)
