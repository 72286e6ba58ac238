"""The table of operations that layers and the sampler compute with, made once for a device.

Every operation has a version in plain torch (`reference.py` of its folder), which is the truth. A backend's table is
the reference's table with the backend's own operations put over it, so an operation that it lacks runs on the
reference. Operations on memory in a layout of the backend's own are methods of the object that holds the memory:
`new_weight` and `new_caches` make these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock import native
from penstock.config.weight_formats import WeightFormat
from penstock.kernels.attention import CacheShape, LayerCaches
from penstock.kernels.attention.native import AttentionKernels
from penstock.kernels.attention.reference_cache import new_caches
from penstock.kernels.batch import BatchKernels, LayOut, lay_out
from penstock.kernels.elementwise import ActivateOp, AddRMSNormOp, AddRowsOp, Columns, GateOp, RMSNormOp
from penstock.kernels.elementwise.native import ElementwiseKernels, NormKernels
from penstock.kernels.elementwise.reference import (
    activate,
    add_rms_norm,
    add_rows,
    copy_columns,
    copy_rows,
    gate,
    gather,
    head_gates,
    rms_norm,
    rms_norm_columns,
    scale,
    scatter,
)
from penstock.kernels.experts import NewExperts, Route
from penstock.kernels.experts.native import MixtureKernels
from penstock.kernels.experts.reference import ReferenceExperts, route
from penstock.kernels.linear.native import LinearKernels
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.linear.reference import ReferenceWeight
from penstock.kernels.linear.weight import NewWeight
from penstock.kernels.lora import NewLora
from penstock.kernels.lora.native import LoraKernels
from penstock.kernels.lora.reference import ReferenceLora
from penstock.kernels.memory import NewTensor, Store, constant, dtype_of, new_tensor, store
from penstock.kernels.quantize.native import QuantizeKernels
from penstock.kernels.quantize.reference import quantize
from penstock.kernels.ranks import Alone, Collective
from penstock.kernels.recurrent import CausalConv, GatedDeltaRule, GatedRMSNorm, StateSpaceScan
from penstock.kernels.recurrent.native import RecurrentKernels
from penstock.kernels.recurrent.reference import causal_conv, gated_delta_rule, gated_rms_norm, state_space_scan
from penstock.kernels.recurrent.states import StateCaches, StateShape, new_states
from penstock.kernels.sampling import Controls, CountTable, TopkLogprobs
from penstock.kernels.sampling.native import SamplingKernels
from penstock.kernels.sampling.reference import apply_bitmask, argmax, penalize, put, sample, take, topk_logprobs
from penstock.native import Library
from penstock.native.program import empty_rows, from_host, on_host
from penstock.system.allocator import Allocator


class Penalize(Protocol):
    def __call__(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        penalties: NDArray[np.float64],
        tables: Sequence[CountTable],
        *,
        undo: bool,
    ) -> Callable[[], object] | None:
        """Apply penalties to the logits of tokens that a sequence already contains, in place.

        Args:
            logits: [num_rows, vocab] float32, contiguous.
            rows: [n], the rows to change, without repetition.
            penalties: [n, 4]: `repetition` divides logits above 0 and multiplies others; then `frequency` is subtracted
                for each occurrence in the answer, and `presence` once; then `share` for each occurrence in prompt and
                answer.
            tables: token counts of the rows.

        Returns:
            With `undo`, a function that restores the logits.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One version of every operation."""

    # ── what layers compute with ─────────────────────────────────────────────────────────────────────────────────────
    new_weight: NewWeight
    """Makes a linear map's weight, not yet filled."""
    new_lora: NewLora
    """Makes the table of a linear map's LoRA updates."""
    new_caches: Callable[[Sequence[CacheShape]], LayerCaches]
    """Makes the KV caches of a cache group's layers, with attention over them. All have as many blocks of one size."""
    new_states: Callable[[StateShape], StateCaches]
    """Makes the recurrent states of a cache group's layers."""
    causal_conv: CausalConv
    gated_delta_rule: GatedDeltaRule
    state_space_scan: StateSpaceScan
    gated_rms_norm: GatedRMSNorm
    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    rms_norm_columns: Callable[[Tensor, int, Tensor, float], None]
    """(x [rows, columns], first, weight [size], eps): `rms_norm` of the columns from `first` on, in place."""
    add_rows: AddRowsOp
    gate: GateOp
    head_gates: Callable[[Tensor, Tensor, int], Tensor]
    """(x [rows, num_heads * head_dim], query, num_heads) -> each head times the sigmoid of its gate; overwrites `x`.

    `query` [rows, num_heads * 2 * head_dim, or more]: each query head is followed by its gate of the same length.
    """
    route: Route
    """Routes each token to its experts."""
    new_experts: NewExperts
    """Makes the experts of a mixture, not yet filled."""
    gather: Callable[[Tensor, Tensor], Tensor]
    """(table [rows, ...], row_ids [count] int64) -> [count, ...]; each row of the table is contiguous."""
    scatter: Callable[[Tensor, Tensor, Tensor], None]
    """(x [count, ...], row_ids [count] int64, table [rows, ...]): copies the rows of `x` to these rows of the table,
    all different."""
    copy_rows: Callable[[Tensor, Sequence[tuple[int, int]]], None]
    """(table [rows, ...], pairs): copies rows of the table simultaneously; each pair is (source, target)."""
    copy_columns: Callable[[Tensor, Tensor, Columns], None]
    """(x [rows, any], out [rows, any], which): copies columns of `x` to columns of `out`, converted to its dtype."""
    scale: Callable[[Tensor, float], Tensor]
    """(x [rows, columns], factor) -> x * factor, rounded once; overwrites `x`."""
    activate: ActivateOp

    empty_rows: Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]
    """(like [rows, ...], shape, dtype) -> [rows, *shape], uninitialised; recorded if `like` is."""
    from_host: Callable[[NDArray[Any], Tensor], Tensor]
    """(array, like) -> the array on the device of `like`; without a copy if that is the host."""
    on_host: Callable[[Tensor], NDArray[Any]]
    """(x) -> its content; without a copy if it is on the host."""

    # ── from logits [rows, vocab] float32, contiguous, to tokens ─────────────────────────────────────────────────────
    argmax: Callable[[Tensor], NDArray[np.int64]]
    """(logits) -> [rows]: the first largest; -1 where one is NaN or plus infinity, or all are minus infinity."""
    sample: Callable[[Tensor, Controls], NDArray[np.int64]]
    """(logits, controls) -> [rows] tokens; -1 as `argmax`."""
    topk_logprobs: Callable[[Tensor, int], TopkLogprobs]
    """(logits, k) -> the `k` most likely tokens, at most the vocabulary, of each row."""
    take: Callable[[Tensor, NDArray[np.int64]], NDArray[np.float32]]
    """(logits, places [n] in the flat tensor) -> a copy of the logits there."""
    put: Callable[[Tensor, NDArray[np.int64], NDArray[np.float32]], None]
    """(logits, places [n] in the flat tensor, all different, values [n]): replaces the logits there."""
    apply_bitmask: Callable[[Tensor, NDArray[np.int64], NDArray[np.int32]], None]
    """(logits, rows, bits [len(rows), vocab / 32 rounded up]): sets logits with bit 0 to minus infinity, in place."""

    penalize: Penalize
    """Applies penalties to some rows, in place."""

    # ── before a step, and before the first ──────────────────────────────────────────────────────────────────────────
    lay_out: LayOut
    """Lays a step's plan out as the columns of a `Batch`."""
    dtype: Callable[[str], torch.dtype]
    """(name, as numpy has it) -> the dtype of tensors."""
    new_tensor: NewTensor
    """Allocates a tensor of the model."""
    constant: Callable[[NDArray[Any], torch.dtype | None, torch.device], Tensor]
    """(values, dtype, device) -> a tensor with these values; None: of their dtype."""
    store: Store
    """Stores rows of a checkpoint, which are numpy arrays, in a weight or a tensor."""
    quantize: Callable[[NDArray[Any], WeightFormat], Quantized | None]
    """(weight [out, in], format) -> integers; None if a weight is not finite or too large."""

    collective: Collective
    """Gathers the outputs of layers whose rows are divided among ranks."""

    allocator: Allocator
    """Allocates host memory: of weights, caches and states on a CPU."""

    library: Library | None = None
    """The native library, if it computes the layers' operations: then calls can be recorded."""


def make_ops(
    device: torch.device,
    collective: Collective | None = None,
    *,
    widened_weights: bool = False,
    allocator: Allocator | None = None,
) -> Ops:
    """The fastest available operations for `device`.

    Args:
        collective: of a rank, if there are several.
        widened_weights: see `reference_ops`; the native kernels multiply weights as they are stored.
        allocator: of host memory; None: the system's.
    """
    library = native.library()
    if library is None:
        return reference_ops(collective, widened_weights=widened_weights, allocator=allocator)
    if device.type == "cpu":
        return native_ops(library, collective, allocator)
    return _quantizing_by(library, reference_ops(collective, allocator=allocator))


def reference_ops(
    collective: Collective | None = None, *, widened_weights: bool = False, allocator: Allocator | None = None
) -> Ops:
    """Operations in plain torch, on any device; `widened_weights`: see `ReferenceWeight`."""
    collective, allocator = collective or Alone(), allocator or Allocator()
    return Ops(
        new_weight=partial(ReferenceWeight, widened=widened_weights),
        new_lora=ReferenceLora,
        new_caches=partial(new_caches, allocator=allocator),
        new_states=partial(new_states, allocator=allocator, copy_rows=copy_rows),
        causal_conv=causal_conv,
        gated_delta_rule=gated_delta_rule,
        state_space_scan=state_space_scan,
        gated_rms_norm=gated_rms_norm,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rms_norm_columns=rms_norm_columns,
        add_rows=add_rows,
        gate=gate,
        head_gates=head_gates,
        route=route,
        new_experts=partial(ReferenceExperts, collective=collective),
        gather=gather,
        scatter=scatter,
        copy_rows=copy_rows,
        copy_columns=copy_columns,
        scale=scale,
        activate=activate,
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
    )


def native_ops(library: Library, collective: Collective | None = None, allocator: Allocator | None = None) -> Ops:
    """Operations in C++, on the CPU."""
    collective, allocator = collective or Alone(), allocator or Allocator()
    norm, elementwise, sampling = NormKernels(library), ElementwiseKernels(library), SamplingKernels(library)
    recurrent = RecurrentKernels(library)
    mixture = MixtureKernels(library, collective)
    return replace(
        _quantizing_by(library, reference_ops(collective, allocator=allocator)),
        new_weight=LinearKernels(library, allocator).new_weight,
        new_lora=LoraKernels(library).new_lora,
        new_caches=AttentionKernels(library, allocator).new_caches,
        new_states=partial(new_states, allocator=allocator, copy_rows=elementwise.copy_rows),
        causal_conv=recurrent.causal_conv,
        gated_delta_rule=recurrent.gated_delta_rule,
        state_space_scan=recurrent.state_space_scan,
        gated_rms_norm=recurrent.gated_rms_norm,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        rms_norm_columns=norm.rms_norm_columns,
        add_rows=elementwise.add_rows,
        gate=elementwise.gate,
        head_gates=elementwise.head_gates,
        route=mixture.route,
        new_experts=mixture.new_experts,
        gather=elementwise.gather,
        scatter=elementwise.scatter,
        copy_rows=elementwise.copy_rows,
        copy_columns=elementwise.copy_columns,
        scale=elementwise.scale,
        activate=elementwise.activate,
        argmax=sampling.argmax,
        sample=sampling.sample,
        topk_logprobs=sampling.topk_logprobs,
        take=sampling.take,
        put=sampling.put,
        apply_bitmask=sampling.apply_bitmask,
        penalize=sampling.penalize,
        lay_out=BatchKernels(library).lay_out,
        library=library,
    )


def _quantizing_by(library: Library, ops: Ops) -> Ops:
    """Add the library's rounding, for any device: a checkpoint's tensors lie in host memory."""
    return replace(ops, quantize=QuantizeKernels(library).quantize)
