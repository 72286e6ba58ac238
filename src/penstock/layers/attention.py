"""Attention over the paged KV cache, as a layer."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.attention import HeadNorms, LayerCache
from penstock.kernels.batch import Batch
from penstock.layers.linear import Linear
from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one attention layer is made of."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """On the scores: usually `head_dim ** -0.5`."""
    sliding_window: int | None
    qkv_bias: bool
    output_bias: bool
    qk_norm_eps: float | None
    """Normalise each head of the queries and keys with this epsilon; None: do not."""


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """What the checkpoint calls an attention layer's parts; `qkv` has one name a map, or one for all."""

    qkv: tuple[str, ...]
    output: str
    query_norm: str
    key_norm: str


class Attention:
    """Projects, rotates, stores the new keys and values, attends; `output` projects back."""

    def __init__(self, names: AttentionNames, shape: AttentionShape, factory: WeightFactory) -> None:
        self.shape = shape
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = (query_size, kv_size, kv_size)
        self.qkv = Linear(names.qkv, shape.hidden_size, sizes, factory, bias=shape.qkv_bias)
        self.output = Linear((names.output,), query_size, (shape.hidden_size,), factory, bias=shape.output_bias)
        self._norms: HeadNorms | None = None
        if shape.qk_norm_eps is not None:
            query_norm, key_norm = (
                factory.tensor(f"{name}.weight", shape.head_dim) for name in (names.query_norm, names.key_norm)
            )
            self._norms = HeadNorms(query_norm, key_norm, shape.qk_norm_eps)

    def attend(self, x: Tensor, angles: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """`x` [num_tokens, hidden_size] -> what `output` projects back, [num_tokens, num_heads * head_dim].

        This step's keys and values are in `cache` then.
        """
        shape = self.shape
        query = cache.rope_and_cache(self.qkv(x), shape.num_heads, self._norms, angles, batch)
        return cache.attend(query, shape.num_heads, batch, scale=shape.scale, sliding_window=shape.sliding_window)
