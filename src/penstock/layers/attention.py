"""The attention layer over the paged KV cache."""

import torch
from torch import Tensor

from penstock.kernels.attention import AttentionOptions, HeadNorms, RopeOptions
from penstock.kernels.batch import Batch
from penstock.kernels.cache import AnyCache
from penstock.kernels.elementwise import Columns
from penstock.kernels.recurrent.states import StateCache
from penstock.layers.attention_spec import AttentionSpec
from penstock.layers.linear import Linear
from penstock.layers.spec import StepInputs
from penstock.native.program import empty_rows
from penstock.quantization.base import WeightFactory


class Attention:
    """Projects to queries, keys and values, applies RoPE, writes the KV cache and attends. See `Mixer`."""

    def __init__(self, spec: AttentionSpec, factory: WeightFactory) -> None:
        self._all, self._spec, self._ops = spec, spec.share(factory.ranks.size), factory.ops
        names, hidden = spec.names, spec.hidden_size
        self.qkv = Linear(spec.qkv_names, hidden, spec.sizes, factory, bias=spec.qkv_bias)
        self.output = Linear(
            (names.output,),
            spec.query_size,
            (hidden,),
            factory,
            bias=spec.output_bias,
            takes_own=True,
            gives_all=True,
        )
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
        )

    def mix(self, x: Tensor, step: StepInputs, batch: Batch, cache: AnyCache | None) -> Tensor:
        assert cache is not None
        assert not isinstance(cache, StateCache), "the cache of another kind of layer"
        spec = self._spec
        qkv, norms = self.qkv(x, step.adapters), self._norms
        if norms is not None and spec.qk_norm_whole:
            assert norms.key is not None, "such a layer has keys of its own"
            self._norm_whole(qkv, 0, self._all.sizes[0], norms.query, norms.eps)
            self._norm_whole(qkv, spec.sizes[0], self._all.sizes[1], norms.key, norms.eps)
        query = cache.rope_and_cache(
            qkv,
            self._rope,
            None if spec.rope is None else step.angles[spec.rope],
            batch,
            query_factors=None if spec.temperature is None else step.temperatures[spec.temperature],
        )
        seen = cache.attend(query, self._attention, batch)
        return self._ops.head_gates(seen, query, spec.num_heads) if spec.output_gate else seen

    def _norm_whole(self, qkv: Tensor, first: int, total: int, weight: Tensor, eps: float) -> None:
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
        mine = empty_rows(qkv, (len(own),), qkv.dtype)
        ops.copy_columns(qkv, mine, Columns(first, 0, len(own)))
        whole = ops.collective.columns(mine, total)
        ops.rms_norm_columns(whole, 0, weight, eps)
        ops.copy_columns(whole, qkv, Columns(own.start, first, len(own)))


def _head_norms(spec: AttentionSpec, eps: float, factory: WeightFactory) -> HeadNorms:
    """The norms of queries and keys, or of queries only if the layer shares the keys of another."""
    names = (spec.names.query_norm, spec.names.key_norm)
    weights = [
        factory.norm(name, size, spec.qk_norm_offset)
        if spec.qk_norm_weight
        else factory.empty(size, dtype=torch.float32).fill_(1.0)
        for name, size in zip(names, spec.norm_sizes, strict=False)
    ]
    return HeadNorms(weights[0], weights[1] if spec.parts > 1 else None, eps)
