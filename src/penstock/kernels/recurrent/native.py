"""Recurrent operations by the native kernels: causal convolution, gated delta rule, state space scans, gated norm."""

import numpy as np

from penstock.kernels.batch import Batch
from penstock.kernels.recurrent import ConvColumns, ConvWeight, DeltaShape, Gates, ScanShape
from penstock.kernels.recurrent.states import CopyRows, StateCaches, StatePart, StateShape, states_in
from penstock.native import Library, address, dtype_code, structs
from penstock.native.array import Array, NoNativeKernelError
from penstock.native.program import call, empty_rows
from penstock.system.allocator import Allocator

_MOST_TAPS = 16
_MOST_ROWS = 512
"""Most rows, and most columns, of a head's matrix state."""


class RecurrentKernels:
    """See `penstock.kernels.recurrent` for the methods (`csrc/causal_conv.cpp` and others).

    They raise NoNativeKernelError for sizes beyond the kernels' limits.
    """

    def __init__(self, library: Library, allocator: Allocator) -> None:
        self._library, self._allocator = library, allocator

    def new_states(self, shape: StateShape, copy_rows: CopyRows[Array]) -> StateCaches[Array]:
        """Allocate the states in one piece; the operating system zeroes pages on first touch."""
        pool = self._allocator.zeros(4 * shape.elements).view(np.float32)
        return states_in(pool, shape, copy_rows, Array)

    def causal_conv(
        self, x: Array, columns: ConvColumns, weight: ConvWeight[Array], state: StatePart[Array], batch: Batch
    ) -> Array:
        kernel, channels = weight.taps.shape
        if kernel > _MOST_TAPS:
            raise NoNativeKernelError(f"a causal convolution over {kernel} tokens")
        assert state.memory.shape[1:] == (kernel - 1, channels)
        out = empty_rows(x, (channels,), x.dtype)
        arguments = structs.ConvArgs(
            state=_state(state),
            batch=batch.handle,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            dtype=dtype_code(x.dtype),
            silu=weight.activation == "silu",
            values=columns.values,
            before=-1 if columns.before is None else columns.before,
            after=-1 if columns.after is None else columns.after,
            kernel=kernel,
            channels=channels,
            taps=weight.taps.data_ptr(),
            bias=address(weight.bias),
            out=out.data_ptr(),
        )
        call(self._library, x, arguments)
        return out

    def gated_delta_rule(
        self,
        qkv: Array,
        projected: Array,
        first_gate: int,
        shape: DeltaShape,
        gates: Gates[Array],
        state: StatePart[Array],
        batch: Batch,
    ) -> Array:
        if max(shape.key_dim, shape.value_dim) > _MOST_ROWS:
            raise NoNativeKernelError(f"a gated delta rule with states of {shape.key_dim} x {shape.value_dim}")
        assert qkv.dtype == projected.dtype
        out = empty_rows(qkv, (shape.value_heads * shape.value_dim,), qkv.dtype)
        arguments = structs.DeltaArgs(
            state=_state(state),
            batch=batch.handle,
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            gates=projected.data_ptr() + first_gate * projected.dtype.itemsize,
            gates_stride=projected.stride(0),
            dtype=dtype_code(qkv.dtype),
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            in_turn=shape.in_turn,
            by_channel=shape.by_channel,
            log_decay=gates.log_decay.data_ptr(),
            step_bias=gates.step_bias.data_ptr(),
            out=out.data_ptr(),
        )
        call(self._library, qkv, arguments)
        return out

    def state_space_scan(
        self,
        xbc: Array,
        projected: Array,
        first_step: int,
        shape: ScanShape,
        gates: Gates[Array],
        skip: Array,
        state: StatePart[Array],
        batch: Batch,
    ) -> Array:
        if max(shape.state_size, shape.head_dim) > _MOST_ROWS:
            raise NoNativeKernelError(f"a state space scan with states of {shape.head_dim} x {shape.state_size}")
        assert xbc.dtype == projected.dtype
        out = empty_rows(xbc, (shape.heads * shape.head_dim,), xbc.dtype)
        arguments = structs.ScanArgs(
            state=_state(state),
            batch=batch.handle,
            xbc=xbc.data_ptr(),
            xbc_stride=xbc.stride(0),
            steps=projected.data_ptr() + first_step * projected.dtype.itemsize,
            steps_stride=projected.stride(0),
            dtype=dtype_code(xbc.dtype),
            heads=shape.heads,
            head_dim=shape.head_dim,
            groups=shape.groups,
            state_size=shape.state_size,
            shortest_step=shape.shortest_step,
            longest_step=shape.longest_step,
            log_decay=gates.log_decay.data_ptr(),
            step_bias=gates.step_bias.data_ptr(),
            skip=skip.data_ptr(),
            out=out.data_ptr(),
        )
        call(self._library, xbc, arguments)
        return out

    def selective_scan(
        self,
        x: Array,
        steps: Array,
        projected: Array,
        first_input: int,
        gates: Gates[Array],
        skip: Array,
        state: StatePart[Array],
        batch: Batch,
    ) -> Array:
        channels, size = gates.log_decay.shape
        if size > _MOST_ROWS:
            raise NoNativeKernelError(f"a selective scan with states of {size}")
        assert x.dtype == steps.dtype == projected.dtype
        out = empty_rows(x, (channels,), x.dtype)
        arguments = structs.SelectiveScanArgs(
            state=_state(state),
            batch=batch.handle,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            steps=steps.data_ptr(),
            steps_stride=steps.stride(0),
            inputs=projected.data_ptr() + first_input * projected.dtype.itemsize,
            inputs_stride=projected.stride(0),
            dtype=dtype_code(x.dtype),
            channels=channels,
            state_size=size,
            log_decay=gates.log_decay.data_ptr(),
            step_bias=gates.step_bias.data_ptr(),
            skip=skip.data_ptr(),
            out=out.data_ptr(),
        )
        call(self._library, x, arguments)
        return out

    def gated_rms_norm(
        self, x: Array, gate: Array, first_gate: int, weight: Array, eps: float, group: int, *, gate_first: bool
    ) -> Array:
        """See `GatedRMSNorm`; overwrites `x` with the result."""
        assert x.is_contiguous()
        assert gate.dtype == x.dtype == weight.dtype
        assert x.shape[1] % group == 0
        arguments = structs.GatedNormArgs(
            x=x.data_ptr(),
            gate=gate.data_ptr() + first_gate * gate.dtype.itemsize,
            gate_stride=gate.stride(0),
            weight=weight.data_ptr(),
            weights=len(weight),
            dtype=dtype_code(x.dtype),
            gate_first=gate_first,
            columns=x.shape[1],
            group=group,
            eps=eps,
        )
        call(self._library, x, arguments)
        return x


def _state(part: StatePart[Array]) -> structs.StatePart:
    memory = part.memory
    assert memory[:1].is_contiguous()
    return structs.StatePart(memory.data_ptr(), memory.stride(0), part.block_size)
