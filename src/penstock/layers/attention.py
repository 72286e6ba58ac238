"""Attention over the paged KV cache, as a layer's mixer."""

from torch import Tensor

from penstock.kernels.attention import HeadNorms
from penstock.kernels.batch import Batch
from penstock.kernels.cache import AnyCache
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.attention_spec import AttentionSpec
from penstock.layers.linear import Linear
from penstock.layers.spec import StepInputs
from penstock.quantization.base import WeightFactory


class Attention:
    """Projects, rotates, stores the new keys and values, attends; `output` projects back. See `Mixer`."""

    def __init__(self, spec: AttentionSpec, factory: WeightFactory) -> None:
        self._spec = spec
        names, hidden = spec.names, spec.hidden_size
        self.qkv = Linear(names.qkv, hidden, spec.sizes, factory, bias=spec.qkv_bias)
        self.output = Linear((names.output,), spec.sizes[0], (hidden,), factory, bias=spec.output_bias)
        self._norms: HeadNorms | None = None
        if spec.qk_norm_eps is not None:
            query_norm, key_norm = (
                factory.tensor(f"{name}.weight", spec.head_dim) for name in (names.query_norm, names.key_norm)
            )
            self._norms = HeadNorms(query_norm, key_norm, spec.qk_norm_eps)

    def mix(self, x: Tensor, step: StepInputs, batch: Batch, cache: AnyCache | None) -> Tensor:
        assert cache is not None
        assert not isinstance(cache, StateCache), "the cache of another kind of layer"
        spec = self._spec
        query = cache.rope_and_cache(self.qkv(x), spec.num_heads, self._norms, step.angles[spec.rope], batch)
        return cache.attend(query, spec.num_heads, batch, scale=spec.scale, sliding_window=spec.window)
