"""The table of operations that layers and the sampler compute with, made once for a device.

Every operation has a version in plain torch (`reference.py` of its folder), which is the truth; `reference_ops.py` is
their table. `native_ops` is the table in C++, on arrays of its own, without torch. A table is whole: an operation, or a
size of one, that C++ lacks raises NoNativeKernelError, and the reference's table computes such a model.
Operations on memory in a layout of the backend's own are methods of the object that holds the memory:
`new_weight` and `new_caches` make these.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config.weight_formats import WeightFormat
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A, A_contra
from penstock.kernels.attention import CacheShape, LayerCaches
from penstock.kernels.attention.native import AttentionKernels
from penstock.kernels.batch import Batch, BatchKernels, LayOut
from penstock.kernels.disentangled import DisentangledOptions
from penstock.kernels.disentangled.native import DisentangledKernels
from penstock.kernels.elementwise import (
    ActivateOp,
    AddRMSNormOp,
    AddRowsOp,
    Columns,
    GateOp,
    MixStreamsOp,
    RMSNormOp,
)
from penstock.kernels.elementwise.native import ElementwiseKernels, NormKernels
from penstock.kernels.experts import NewExperts, Route
from penstock.kernels.experts.native import MixtureKernels
from penstock.kernels.linear.native import LinearKernels
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.linear.weight import NewWeight
from penstock.kernels.lora import NewExpertLora, NewLookupTable, NewLora
from penstock.kernels.lora.native import LoraKernels
from penstock.kernels.memory import NewTensor, Store, constant, new_array, store
from penstock.kernels.quantize.native import QuantizeKernels
from penstock.kernels.ranks import Alone, Collective
from penstock.kernels.recurrent import CausalConv, GatedDeltaRule, GatedRMSNorm, SelectiveScan, StateSpaceScan
from penstock.kernels.recurrent.native import RecurrentKernels
from penstock.kernels.recurrent.states import StateCaches, StateShape
from penstock.kernels.sampling import Controls, CountTable, TopkLogprobs
from penstock.kernels.sampling.native import SamplingKernels
from penstock.native import Library
from penstock.native.array import AnyDtype, Array, dtype_of
from penstock.native.program import empty_rows, from_host, on_host
from penstock.system.allocator import Allocator


class Penalize(Protocol[A_contra]):
    def __call__(
        self,
        logits: A_contra,
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
class Ops(Generic[A]):
    """One version of every operation."""

    # ── what layers compute with ─────────────────────────────────────────────────────────────────────────────────────
    new_weight: NewWeight[A]
    """Makes a linear map's weight, not yet filled."""
    new_lora: NewLora[A]
    """Makes the table of a linear map's LoRA updates."""
    new_expert_lora: NewExpertLora[A]
    """Makes the tables of experts' updates, one for each expert."""
    new_lookup_table: NewLookupTable[A]
    """Makes the table of an embedding's updates."""
    new_caches: Callable[[Sequence[CacheShape]], LayerCaches[A]]
    """Makes the KV caches of a cache group's layers, with attention over them. All have as many blocks of one size."""
    disentangled_attention: Callable[[A, DisentangledOptions[A], Batch], A]
    """(qkv [num_tokens, 3 * num_heads * head_dim], options, batch) -> [num_tokens, num_heads * head_dim]: attention of
    each token to all of its text, which the batch has whole."""
    new_states: Callable[[StateShape], StateCaches[A]]
    """Makes the recurrent states of a cache group's layers."""
    causal_conv: CausalConv[A]
    gated_delta_rule: GatedDeltaRule[A]
    state_space_scan: StateSpaceScan[A]
    selective_scan: SelectiveScan[A]
    gated_rms_norm: GatedRMSNorm[A]
    rms_norm: RMSNormOp[A]
    add_rms_norm: AddRMSNormOp[A]
    rms_norm_columns: Callable[[A, int, A, float], None]
    """(x [rows, columns], first, weight [size], eps): `rms_norm` of the columns from `first` on, in place."""
    add_rows: AddRowsOp[A]
    gate: GateOp[A]
    mix_streams: MixStreamsOp[A]
    match_magnitude: Callable[[A, A, float], A]
    """(x [rows, columns], like [rows, columns or more], least) -> x, each row scaled to the root mean square of the
    first columns of `like`, and taken to have a mean square of at least `least`; overwrites `x`."""
    keep_above: Callable[[A, float], A]
    """(x [rows, columns], deviations) -> max(0, x - mean - deviations * standard deviation), by row; overwrites `x`."""
    head_gates: Callable[[A, A, int], A]
    """(x [rows, num_heads * head_dim], query, num_heads) -> each head times the sigmoid of its gate; overwrites `x`.

    `query` [rows, num_heads * 2 * head_dim, or more]: each query head is followed by its gate of the same length.
    """
    route: Route[A]
    """Routes each token to its experts."""
    new_experts: NewExperts[A]
    """Makes the experts of a mixture, not yet filled."""
    gather: Callable[[A, A], A]
    """(table [rows, ...], row_ids [count] int64) -> [count, ...]; each row of the table is contiguous."""
    gather_axes: Callable[[A, A, A], A]
    """(table [rows, 2, columns] float32, row_ids [count, 3] int64, axes [columns] int32) -> [count, 2, columns]: each
    column from the row that its axis names."""
    scatter: Callable[[A, A, A], None]
    """(x [count, ...], row_ids [count] int64, table [rows, ...]): copies the rows of `x` to these rows of the table,
    all different."""
    neighbours: Callable[[A, Batch, int, int], A]
    """(x [num_tokens, size], batch, width, columns) -> [num_tokens, columns]: the rows of the `width` tokens around
    each, side by side, then zeros; rows of tokens beyond its text, which the batch has whole, are zeros."""
    copy_rows: Callable[[A, Sequence[tuple[int, int]]], None]
    """(table [rows, ...], pairs): copies rows of the table simultaneously; each pair is (source, target)."""
    copy_columns: Callable[[A, A, Columns], None]
    """(x [rows, any], out [rows, any], which): copies columns of `x` to columns of `out`, converted to its dtype."""
    activate: ActivateOp[A]
    limit: Callable[[A, int, int, A, A], None]
    """(x [rows, any], first, count, low [1], high [1] float32): limits `count` columns from `first` on, in place."""

    empty_rows: Callable[[A, tuple[int, ...], AnyDtype], A]
    """(like [rows, ...], shape, dtype) -> [rows, *shape], uninitialised; recorded if `like` is."""
    from_host: Callable[[NDArray[Any], A], A]
    """(array, like) -> the array on the device of `like`; without a copy if that is the host."""
    on_host: Callable[[A], NDArray[Any]]
    """(x) -> its content; without a copy if it is on the host."""

    # ── from logits [rows, vocab] float32, contiguous, to tokens ─────────────────────────────────────────────────────
    argmax: Callable[[A], NDArray[np.int64]]
    """(logits) -> [rows]: the first largest; -1 where one is NaN or plus infinity, or all are minus infinity."""
    sample: Callable[[A, Controls], NDArray[np.int64]]
    """(logits, controls) -> [rows] tokens; -1 as `argmax`."""
    topk_logprobs: Callable[[A, int], TopkLogprobs]
    """(logits, k) -> the `k` most likely tokens, at most the vocabulary, of each row."""
    take: Callable[[A, NDArray[np.int64]], NDArray[np.float32]]
    """(logits, places [n] in the flat tensor) -> a copy of the logits there."""
    put: Callable[[A, NDArray[np.int64], NDArray[np.float32]], None]
    """(logits, places [n] in the flat tensor, all different, values [n]): replaces the logits there."""
    apply_bitmask: Callable[[A, NDArray[np.int64], NDArray[np.int32]], None]
    """(logits, rows, bits [len(rows), vocab / 32 rounded up]): sets logits with bit 0 to minus infinity, in place."""

    penalize: Penalize[A]
    """Applies penalties to some rows, in place."""

    # ── before a step, and before the first ──────────────────────────────────────────────────────────────────────────
    lay_out: LayOut
    """Lays a step's plan out as the columns of a `Batch`."""
    dtype: Callable[[str], AnyDtype]
    """(name, as numpy has it) -> the dtype of tensors."""
    new_tensor: NewTensor[A]
    """Allocates a tensor of the model."""
    constant: Callable[[NDArray[Any], AnyDtype | None, str], A]
    """(values, dtype, device) -> a tensor with these values; None: of their dtype."""
    store: Store[A]
    """Stores rows of a checkpoint, which are numpy arrays, in a weight or a tensor."""
    quantize: Callable[[NDArray[Any], WeightFormat], Quantized | None]
    """(weight [out, in], format) -> integers; None if a weight is not finite or too large."""

    collective: Collective[A]
    """Gathers the outputs of layers whose rows are divided among ranks."""

    allocator: Allocator
    """Allocates host memory: of weights, caches and states on a CPU."""

    inference: Callable[[], AbstractContextManager[object]]
    """Makes a context in which a model is loaded and computed."""

    library: Library | None = None
    """The native library, if it computes the layers' operations: then calls can be recorded."""


def native_ops(
    library: Library, collective: Collective[Array] | None = None, allocator: Allocator | None = None
) -> Ops[Array]:
    """Operations in C++, on the CPU."""
    collective, allocator = collective or Alone(), allocator or Allocator()
    norm, elementwise, sampling = NormKernels(library), ElementwiseKernels(library), SamplingKernels(library)
    recurrent, mixture = RecurrentKernels(library, allocator), MixtureKernels(library, collective)
    lora = LoraKernels(library)
    table: type[Ops[Array]] = Ops  # named, so that mypy compares the arrays of each operation
    return table(
        new_weight=LinearKernels(library, allocator).new_weight,
        new_lora=lora.new_lora,
        new_expert_lora=lora.new_expert_lora,
        new_lookup_table=lora.new_lookup_table,
        new_caches=AttentionKernels(library, allocator).new_caches,
        disentangled_attention=DisentangledKernels(library).disentangled_attention,
        new_states=partial(recurrent.new_states, copy_rows=elementwise.copy_rows),
        causal_conv=recurrent.causal_conv,
        gated_delta_rule=recurrent.gated_delta_rule,
        state_space_scan=recurrent.state_space_scan,
        selective_scan=recurrent.selective_scan,
        gated_rms_norm=recurrent.gated_rms_norm,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        rms_norm_columns=norm.rms_norm_columns,
        add_rows=elementwise.add_rows,
        gate=elementwise.gate,
        mix_streams=elementwise.mix_streams,
        match_magnitude=elementwise.match_magnitude,
        keep_above=elementwise.keep_above,
        head_gates=elementwise.head_gates,
        route=mixture.route,
        new_experts=mixture.new_experts,
        gather=elementwise.gather,
        gather_axes=elementwise.gather_axes,
        scatter=elementwise.scatter,
        neighbours=elementwise.neighbours,
        copy_rows=elementwise.copy_rows,
        copy_columns=elementwise.copy_columns,
        activate=elementwise.activate,
        limit=elementwise.limit,
        empty_rows=empty_rows,
        from_host=from_host,
        on_host=on_host,
        argmax=sampling.argmax,
        sample=sampling.sample,
        topk_logprobs=sampling.topk_logprobs,
        take=sampling.take,
        put=sampling.put,
        apply_bitmask=sampling.apply_bitmask,
        penalize=sampling.penalize,
        lay_out=BatchKernels(library).lay_out,
        dtype=dtype_of,
        new_tensor=partial(new_array, allocator=allocator),
        constant=constant,
        store=store,
        quantize=QuantizeKernels(library).quantize,
        collective=collective,
        allocator=allocator,
        inference=nullcontext,
        library=library,
    )
