"""The reference's table of operations: every operation in plain torch, on any device."""

from dataclasses import replace
from functools import partial

import torch

from penstock.kernels.attention.reference_cache import new_caches
from penstock.kernels.batch import lay_out
from penstock.kernels.disentangled.reference import disentangled_attention
from penstock.kernels.elementwise.reference import (
    activate,
    add_rms_norm,
    add_rows,
    copy_columns,
    copy_rows,
    gate,
    gather,
    gather_axes,
    head_gates,
    keep_above,
    limit,
    match_magnitude,
    mix_streams,
    neighbours,
    rms_norm,
    rms_norm_columns,
    scatter,
)
from penstock.kernels.experts.reference import ReferenceExperts, route
from penstock.kernels.linear.reference import ReferenceWeight
from penstock.kernels.lora.reference import ReferenceLookup, ReferenceLora, new_expert_lora
from penstock.kernels.ops import Ops
from penstock.kernels.quantize.reference import quantize
from penstock.kernels.ranks import Alone, Collective
from penstock.kernels.recurrent.reference import (
    causal_conv,
    gated_delta_rule,
    gated_rms_norm,
    new_states,
    selective_scan,
    state_space_scan,
)
from penstock.kernels.reference_memory import constant, dtype_of, empty_rows, from_host, new_tensor, on_host, store
from penstock.kernels.sampling.reference import apply_bitmask, argmax, penalize, put, sample, take, topk_logprobs
from penstock.system.allocator import Allocator


def reference_ops(
    collective: Collective[torch.Tensor] | None = None,
    *,
    widened_weights: bool = False,
    allocator: Allocator | None = None,
) -> Ops[torch.Tensor]:
    """Operations in plain torch, on any device; `widened_weights`: see `ReferenceWeight`."""
    collective, allocator = collective or Alone(), allocator or Allocator()
    table: type[Ops[torch.Tensor]] = Ops  # named, so that mypy compares the arrays of each operation
    return table(
        new_weight=partial(ReferenceWeight, widened=widened_weights),
        new_lora=ReferenceLora,
        new_expert_lora=new_expert_lora,
        new_lookup_table=ReferenceLookup,
        new_caches=partial(new_caches, allocator=allocator),
        disentangled_attention=disentangled_attention,
        new_states=partial(new_states, allocator=allocator, copy_rows=copy_rows),
        causal_conv=causal_conv,
        gated_delta_rule=gated_delta_rule,
        state_space_scan=state_space_scan,
        selective_scan=selective_scan,
        gated_rms_norm=gated_rms_norm,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rms_norm_columns=rms_norm_columns,
        add_rows=add_rows,
        gate=gate,
        mix_streams=mix_streams,
        match_magnitude=match_magnitude,
        keep_above=keep_above,
        head_gates=head_gates,
        route=route,
        new_experts=partial(ReferenceExperts, collective=collective),
        gather=gather,
        gather_axes=gather_axes,
        scatter=scatter,
        neighbours=neighbours,
        copy_rows=copy_rows,
        copy_columns=copy_columns,
        activate=activate,
        limit=limit,
        empty_rows=empty_rows,
        from_host=from_host,
        on_host=on_host,
        argmax=argmax,
        sample=sample,
        topk_logprobs=topk_logprobs,
        take=take,
        put=put,
        apply_bitmask=apply_bitmask,
        penalize=penalize,
        lay_out=lay_out,
        dtype=dtype_of,
        new_tensor=partial(new_tensor, allocator=allocator),
        constant=constant,
        store=store,
        quantize=quantize,
        collective=collective,
        allocator=allocator,
        inference=torch.inference_mode,
    )


def over_tensors(ops: Ops) -> Ops[torch.Tensor]:
    """These operations over tensors of torch in host memory: native kernels take them, too. Nothing can be recorded."""
    if ops.library is None:
        return ops
    return replace(
        ops,
        new_states=partial(new_states, allocator=ops.allocator, copy_rows=ops.copy_rows),
        empty_rows=empty_rows,
        from_host=from_host,
        on_host=on_host,
        dtype=dtype_of,
        new_tensor=partial(new_tensor, allocator=ops.allocator),
        constant=constant,
        store=store,
        inference=torch.inference_mode,
        library=None,
    )
