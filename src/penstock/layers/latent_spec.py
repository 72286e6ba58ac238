"""Multi-head latent attention, as plain data. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.layers.rope import RopeConfig
from penstock.layers.spec import MatrixSize, Mixer
from penstock.model_facts import KVSpec, Working

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class LatentNames:
    """What the checkpoint calls the parts, within the layer; the defaults are DeepSeek's."""

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
    """Attention over a latent of each token, from which heads take their keys and values (DeepSeek-AI, 2024,
    arXiv:2405.04434). See `MixerSpec` for the methods.

    Keys and values are linear maps of the latent, so that they need not be made: queries are mapped to where latents
    are, and what a head sees of the latents is mapped to what it would see of its values. What is kept of a token is
    the part of its key that is rotated, the same for all heads, and the latent: as one head of keys, which are the
    values too.
    """

    hidden_size: int
    num_heads: int
    rank: int
    """Elements of a latent."""
    key_dim: int
    """Of a head's key, those that come from the latent."""
    value_dim: int
    rope: RopeConfig
    """On as many elements of keys and queries beside those."""
    scale: float
    query_rank: int | None = None
    """Elements that queries are first mapped to, and normalised; None: they are not."""
    paired: bool = True
    """The rotated elements are in pairs of neighbours: x0 y0 x1 y1 .."""
    bias: bool = False
    """Of the maps of hidden states, other than to queries of full size."""
    norm_eps: float = 1e-6
    names: LatentNames = field(default_factory=LatentNames)

    @property
    def width(self) -> int:
        """Elements that are kept of a token."""
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
        from penstock.layers.latent import LatentAttention  # here, not above: the server process has no torch

        return LatentAttention(self, factory)
