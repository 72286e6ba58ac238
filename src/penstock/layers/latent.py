"""Multi-head latent attention (MLA), with `kv_b_proj` absorbed: keys and values per head are never materialized.

query of a head     [rotated part | the rest times the head's key part of `kv_b_proj`]      rope.dim + rank
cache entry         [rotated key | latent], one per token for all heads                     rope.dim + rank
output of a head    the latent columns of the attention output times the head's value part of `kv_b_proj`
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Generic

from penstock.config.model_facts import ActivationSizes, KVSpec
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.attention import AttentionOptions, RopeOptions
from penstock.kernels.elementwise import Columns
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.linear import Linear, output_linear
from penstock.layers.rope import RopeConfig, TemperatureConfig
from penstock.layers.spec import Mixer, StepInputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.kernels.linear.weight import Weight
    from penstock.kernels.lora import LoraTable
    from penstock.kernels.lora.rows import AdapterRows
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
    rope: RopeConfig | None
    """RoPE on `rope.dim` further elements of queries and keys (`qk_rope_head_dim`); None: see `unrotated`."""
    scale: float
    query_rank: int | None = None
    """Size of the normalized low-rank input of the query projection (`q_lora_rank`); None: full rank."""
    paired: bool = True
    """Whether the checkpoint has the rotated elements in adjacent pairs: x0 y0 x1 y1 .."""
    bias: bool = False
    """Whether the projections of hidden states have biases, except a full-rank query projection."""
    norm_eps: float = 1e-6
    temperature: TemperatureConfig | None = None
    """Position-dependent factor on the queries."""
    unrotated: int = 0
    """Without RoPE, the number of those elements."""
    names: LatentNames = field(default_factory=LatentNames)

    @property
    def rotated(self) -> int:
        """Elements of a key that all heads share, with RoPE if there is one."""
        return self.unrotated if self.rope is None else self.rope.dim

    @property
    def width(self) -> int:
        """Elements of a token's cache entry."""
        return self.rotated + self.rank

    @property
    def query_size(self) -> int:
        return self.num_heads * (self.key_dim + self.rotated)

    @property
    def cache(self) -> KVSpec:
        return KVSpec(1, self.width, latent=True)

    @property
    def activation_sizes(self) -> ActivationSizes:
        columns = (2 * self.num_heads + 1) * self.width + self.query_size + (self.query_rank or 0) * 2
        values = self.num_heads * self.value_dim
        total = columns + 2 * self.width + values
        return ActivationSizes(total, total, max(values, self.query_rank or 0))

    @property
    def tp_divisor(self) -> int:
        return self.num_heads

    def shard(self, tp_size: int) -> LatentAttentionSpec:
        return replace(self, num_heads=self.num_heads // tp_size)

    def build(self, factory: WeightFactory[A]) -> Mixer[A]:
        return LatentAttention(self, factory)


class HeadMaps(Generic[A]):
    """`kv_b_proj`, which maps latents to the keys and values of all heads, split into two weights per head.

    `keys` map a head's query to the latent space; `values` map the head's attention output from the latent space to its
    value.
    """

    def __init__(self, spec: LatentAttentionSpec, factory: WeightFactory[A]) -> None:
        name = spec.names.heads
        self._key_dim, self._each = spec.key_dim, spec.key_dim + spec.value_dim
        self._own = factory.ranks.own(spec.num_heads)
        self.keys = [factory.weight_of(name, spec.rank, spec.key_dim) for _ in self._own]
        self.values = [factory.weight_of(name, spec.value_dim, spec.rank) for _ in self._own]
        self.lora = factory.head_lora(name, spec.num_heads, spec.key_dim, spec.value_dim, spec.rank)
        self._load_into = factory.load_into
        factory.whole_matrix(name, spec.num_heads * self._each, spec.rank, self._fill)

    def _fill(self, whole: NDArray[Any]) -> None:
        """`whole` [num_heads * (key_dim + value_dim), rank]"""
        heads = whole.reshape(-1, self._each, whole.shape[1])
        for keys, values, head in zip(self.keys, self.values, self._own, strict=True):
            # Transposed, to map queries to latents rather than latents to keys.
            self._load_into(keys, heads[head, : self._key_dim].T)
            self._load_into(values, heads[head, self._key_dim :])


class LatentAttention(Generic[A]):
    """See `LatentAttentionSpec`, and `Mixer` for the methods."""

    def __init__(self, spec: LatentAttentionSpec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops = spec.shard(factory.ranks.size), factory.ops
        self._rope = RopeOptions(self._spec.num_heads, parts=2)
        self._attention = AttentionOptions(self._spec.num_heads, spec.scale)
        names, hidden, bias = spec.names, spec.hidden_size, spec.bias
        self._down: Linear[A] | None = None
        if spec.query_rank is None:
            self._query = Linear((names.query,), hidden, (spec.query_size,), factory, bias=False)
        else:
            self._down = Linear((names.query_down,), hidden, (spec.query_rank,), factory, bias=bias, gather_output=True)
            self._down_norm = factory.tensor(f"{names.query_norm}.weight", spec.query_rank)
            self._query = Linear((names.query_up,), spec.query_rank, (spec.query_size,), factory, bias=False)
        self._latent = Linear((names.latent,), hidden, (spec.width,), factory, bias=bias, gather_output=True)
        self._latent_norm = factory.tensor(f"{names.latent_norm}.weight", spec.rank)
        self._heads = HeadMaps(spec, factory)
        self._output = output_linear(names.output, spec.num_heads * spec.value_dim, hidden, factory, bias=bias)

    def mix(self, x: A, step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None) -> A:
        """The attention output over cache entries: [num_tokens, num_heads * width]."""
        assert cache is not None
        assert not isinstance(cache, StateCache), "the cache of another kind of layer"
        spec = self._spec
        projected = self._queries_and_key(x, step.adapters)
        factors = None if spec.temperature is None else step.temperatures[spec.temperature]
        angles = None if spec.rope is None else step.angles[spec.rope]
        query = cache.rope_and_cache(projected, self._rope, angles, batch, query_factors=factors)
        return cache.attend(query, self._attention, batch)

    def output(self, mixed: A, adapters: AdapterRows | None = None) -> A:
        """`mixed`, the result of `mix` -> [num_tokens, hidden_size]."""
        spec = self._spec
        values = self._ops.empty_rows(mixed, (spec.num_heads * spec.value_dim,), mixed.dtype)
        firsts = [head * spec.width + spec.rotated for head in range(spec.num_heads)]
        tables = None if self._heads.lora is None else self._heads.lora.values
        _by_head(self._heads.values, mixed, firsts, values, 0, spec.value_dim, tables, adapters)
        return self._output(values, adapters)

    def _queries_and_key(self, x: A, adapters: AdapterRows | None) -> A:
        """[num_tokens, (num_heads + 1) * width]: the heads' queries, then the cache entry."""
        spec, ops = self._spec, self._ops
        rotated, width, each = spec.rotated, spec.width, spec.key_dim + spec.rotated
        narrow = x if self._down is None else ops.rms_norm(self._down(x, adapters), self._down_norm, spec.norm_eps)
        query = self._query(narrow, adapters)
        latent = self._latent(x, adapters)
        # The norm takes whole rows, and the latent has the shared key beside it.
        rank_alone = ops.empty_rows(x, (spec.rank,), x.dtype)
        ops.copy_columns(latent, rank_alone, Columns(0, 0, spec.rank))
        normed = ops.rms_norm(rank_alone, self._latent_norm, spec.norm_eps)
        projected = ops.empty_rows(x, ((spec.num_heads + 1) * width,), x.dtype)
        heads = Columns(spec.key_dim, 0, rotated, spec.num_heads, each, width, paired=spec.paired)
        ops.copy_columns(query, projected, heads)
        firsts = [head * each for head in range(spec.num_heads)]
        tables = None if self._heads.lora is None else self._heads.lora.keys
        _by_head(self._heads.keys, query, firsts, projected, rotated, width, tables, adapters)
        key = spec.num_heads * width
        ops.copy_columns(latent, projected, Columns(spec.rank, key, rotated, paired=spec.paired))
        ops.copy_columns(normed, projected, Columns(0, key + rotated, spec.rank))
        return projected


def _by_head(
    maps: list[Weight[A]],
    x: A,
    columns: list[int],
    out: A,
    first: int,
    step: int,
    tables: tuple[LoraTable[A], ...] | None,
    adapters: AdapterRows | None,
) -> None:
    """Multiply each head's columns of `x`, which begin at `columns`, with its weight, into `out`.

    The result of head i begins at column `first + i * step`; `tables` have its adapters' updates.
    """
    for head, (weight, column) in enumerate(zip(maps, columns, strict=True)):
        update = None
        if tables is not None and adapters is not None:
            update = tables[head].update(x, adapters, column=column)
        weight.linear_into(out, first + head * step, x, None, column=column, update=update)
