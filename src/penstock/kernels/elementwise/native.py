"""Row-wise operations by the native kernels: gather, scatter and sums (`csrc/gather.cpp`), columns
(`csrc/columns.cpp`), activations (`csrc/activate.cpp`), gates (`csrc/gate.cpp`, `csrc/head_gates.cpp`) and
normalization (`csrc/norm.cpp`)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.config.feed_forward import Activation
from penstock.kernels.batch import Batch
from penstock.kernels.elementwise import Columns, ElementActivation, NormWeight
from penstock.kernels.linear.native import activation_code
from penstock.native import Library, address, dtype_code
from penstock.native.array import Array, dtype_name
from penstock.native.program import call, call_now, empty_rows
from penstock.native.structs import (
    ActivateArgs,
    AddArgs,
    ColumnsArgs,
    GateArgs,
    GatherArgs,
    GatherAxesArgs,
    HeadGatesArgs,
    KeepAboveArgs,
    LimitArgs,
    MatchArgs,
    MixStreamsArgs,
    NeighboursArgs,
    NormArgs,
    ScatterArgs,
)

_ACTIVATIONS: dict[ElementActivation | None, int] = {
    None: 0,
    "silu": 1,
    "gelu": 5,
    "relu": 6,
    "sigmoid": 7,
    "tanh": 8,
    "clip": 9,
    "xielu": 10,
}
"""Codes of ops.h."""


class ElementwiseKernels:
    """See `penstock.kernels.ops.Ops` for the methods."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def gather(self, table: Array, row_ids: Array) -> Array:
        assert dtype_name(row_ids.dtype) == "int64"
        assert row_ids.is_contiguous()
        out = empty_rows(row_ids, tuple(table.shape[1:]), table.dtype)
        row_bytes, stride = _rows(table)
        arguments = GatherArgs(
            table=table.data_ptr(),
            table_stride=stride,
            row_bytes=row_bytes,
            row_ids=row_ids.data_ptr(),
            y=out.data_ptr(),
        )
        call(self._library, row_ids, arguments)
        return out

    def gather_axes(self, table: Array, row_ids: Array, axes: Array) -> Array:
        assert (dtype_name(row_ids.dtype), dtype_name(axes.dtype)) == ("int64", "int32")
        assert (row_ids.shape[1:], table.shape[2:]) == ((3,), axes.shape)
        assert row_ids.is_contiguous()
        out = empty_rows(row_ids, tuple(table.shape[1:]), table.dtype)
        arguments = GatherAxesArgs(
            table=table.data_ptr(),
            row_ids=row_ids.data_ptr(),
            axes=axes.data_ptr(),
            columns=table.shape[2],
            y=out.data_ptr(),
        )
        call(self._library, row_ids, arguments)
        return out

    def scatter(self, x: Array, row_ids: Array, table: Array) -> None:
        assert dtype_name(row_ids.dtype) == "int64"
        assert row_ids.is_contiguous()
        assert x.is_contiguous()
        assert (x.shape[1:], x.dtype) == (table.shape[1:], table.dtype)
        row_bytes, stride = _rows(table)
        arguments = ScatterArgs(
            x=x.data_ptr(),
            row_bytes=row_bytes,
            row_ids=row_ids.data_ptr(),
            table=table.data_ptr(),
            table_stride=stride,
        )
        call(self._library, row_ids, arguments)

    def neighbours(self, x: Array, batch: Batch, width: int, columns: int) -> Array:
        assert x.is_contiguous()
        out, item = empty_rows(x, (columns,), x.dtype), x.dtype.itemsize
        arguments = NeighboursArgs(
            batch=batch.handle,
            x=x.data_ptr(),
            x_bytes=x.shape[1] * item,
            y=out.data_ptr(),
            y_bytes=columns * item,
            width=width,
        )
        call(self._library, x, arguments)
        return out

    def copy_rows(self, table: Array, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = np.ascontiguousarray(np.array(pairs, np.int64).T)
        row_bytes, stride = _rows(table)
        between = np.empty(len(pairs) * row_bytes, np.uint8)
        begin, x = table.data_ptr(), _address(between)
        gathered = GatherArgs(table=begin, table_stride=stride, row_bytes=row_bytes, row_ids=_address(sources), y=x)
        call_now(self._library, len(pairs), gathered)
        scattered = ScatterArgs(x=x, row_bytes=row_bytes, row_ids=_address(targets), table=begin, table_stride=stride)
        call_now(self._library, len(pairs), scattered)

    def copy_columns(self, x: Array, out: Array, columns: Columns) -> None:
        assert x.dtype == out.dtype or not columns.paired
        assert x.stride(1) == out.stride(1) == 1
        arguments = ColumnsArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=out.data_ptr(),
            y_stride=out.stride(0),
            dtype=dtype_code(x.dtype),
            y_dtype=dtype_code(out.dtype),
            paired=columns.paired,
            first=columns.first,
            to=columns.to,
            count=columns.count,
            heads=columns.heads,
            step=columns.step,
            to_step=columns.to_step,
        )
        call(self._library, x, arguments)

    def activate(
        self,
        x: Array,
        activation: ElementActivation | None,
        *,
        divisor: float = 1.0,
        factor: float = 1.0,
        alphas: tuple[Array, Array] | None = None,
    ) -> Array:
        assert x.dim() == 2
        assert x.is_contiguous()
        arguments = ActivateArgs(
            x=x.data_ptr(),
            dtype=dtype_code(x.dtype),
            activation=_ACTIVATIONS[activation],
            columns=x.shape[1],
            divisor=divisor,
            factor=factor,
        )
        if alphas is not None:
            arguments.alpha_p, arguments.alpha_n = (alpha.data_ptr() for alpha in alphas)
        call(self._library, x, arguments)
        return x

    def limit(self, x: Array, first: int, count: int, low: Array, high: Array) -> None:
        assert x.stride(1) == 1
        assert first + count <= x.shape[1]
        arguments = LimitArgs(
            x=x.data_ptr() + first * x.dtype.itemsize,
            stride=x.stride(0),
            dtype=dtype_code(x.dtype),
            columns=count,
            low=low.data_ptr(),
            high=high.data_ptr(),
        )
        call(self._library, x, arguments)

    def add_rows(self, x: Array, residual: Array, factor: float, *, total: Array | None = None) -> Array:
        assert x.dim() == 2
        assert (residual.shape, residual.dtype) == (x.shape, x.dtype)
        assert x.is_contiguous()
        assert residual.is_contiguous()
        arguments = AddArgs(
            x=x.data_ptr(),
            residual=residual.data_ptr(),
            dtype=dtype_code(x.dtype),
            columns=x.shape[1],
            factor=factor,
            total=address(total),
        )
        call(self._library, x, arguments)
        return residual

    def gate(self, x: Array, others: Array, first: int, activation: Activation) -> Array:
        assert x.dtype == others.dtype
        assert x.is_contiguous()
        assert first + x.shape[1] <= others.shape[1]
        arguments = GateArgs(
            x=x.data_ptr(),
            y=others.data_ptr() + first * others.dtype.itemsize,
            y_stride=others.stride(0),
            dtype=dtype_code(x.dtype),
            activation=activation_code(activation),
            columns=x.shape[1],
        )
        call(self._library, x, arguments)
        return x

    def mix_streams(
        self, x: Array, factors: Array, inputs: int, outputs: int, size: int, *, scale: Array | None = None
    ) -> Array:
        """See `MixStreamsOp`."""
        assert inputs * size <= x.shape[1]
        assert outputs * inputs <= factors.shape[1]
        out = empty_rows(x, (outputs * size,), x.dtype)
        arguments = MixStreamsArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            factors=factors.data_ptr(),
            factors_stride=factors.stride(0),
            scale=address(scale),
            dtype=dtype_code(x.dtype),
            inputs=inputs,
            outputs=outputs,
            size=size,
            out=out.data_ptr(),
        )
        call(self._library, x, arguments)
        return out

    def match_magnitude(self, x: Array, like: Array, least: float) -> Array:
        assert x.is_contiguous()
        assert x.dtype == like.dtype
        arguments = MatchArgs(
            x=x.data_ptr(),
            like=like.data_ptr(),
            like_stride=like.stride(0),
            dtype=dtype_code(x.dtype),
            columns=x.shape[1],
            least=least,
        )
        call(self._library, x, arguments)
        return x

    def keep_above(self, x: Array, deviations: float) -> Array:
        assert x.is_contiguous()
        arguments = KeepAboveArgs(x=x.data_ptr(), dtype=dtype_code(x.dtype), columns=x.shape[1], deviations=deviations)
        call(self._library, x, arguments)
        return x

    def head_gates(self, x: Array, query: Array, num_heads: int) -> Array:
        assert x.dtype == query.dtype
        assert x.is_contiguous()
        head_dim = x.shape[1] // num_heads
        arguments = HeadGatesArgs(
            x=x.data_ptr(),
            gate=query.data_ptr() + head_dim * query.dtype.itemsize,
            gate_stride=query.stride(0),
            gate_step=2 * head_dim,
            dtype=dtype_code(x.dtype),
            num_heads=num_heads,
            head_dim=head_dim,
        )
        call(self._library, x, arguments)
        return x


def _rows(table: Array) -> tuple[int, int]:
    """The bytes of a row [...] of `table` [rows, ...], which is contiguous, and those from one to the next."""
    size = table.dtype.itemsize
    for axis in reversed(range(1, table.dim())):
        is_next = table.stride(axis) * table.dtype.itemsize == size
        assert table.shape[axis] == 1 or is_next, "a row of the table is not contiguous"
        size *= table.shape[axis]
    return size, table.stride(0) * table.dtype.itemsize


def _address(array: NDArray[np.int64] | NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]  # `ctypes.data` is slower
    return address


class NormKernels:
    """See `penstock.kernels.ops.Ops` for the methods; `x` [rows, size] is contiguous, results are rounded once."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def rms_norm(self, x: Array, weight: Array, eps: float, *, bias: Array | None = None, groups: int = 1) -> Array:
        assert groups * len(weight) == x.shape[1]
        out = empty_rows(x, (x.shape[1],), x.dtype)
        arguments = self._arguments(x, out, weight, eps, bias)
        arguments.groups = groups
        call(self._library, x, arguments)
        return out

    def add_rms_norm(
        self,
        x: Array,
        residual: Array,
        weight: Array,
        eps: float,
        factor: float,
        *,
        bias: Array | None = None,
        after: NormWeight[Array] | None = None,
        total: Array | None = None,
    ) -> tuple[Array, Array]:
        """See `AddRMSNormOp`; overwrites `x` and `residual` with the results."""
        assert (residual.shape, residual.dtype) == (x.shape, x.dtype)
        assert residual.is_contiguous()
        assert len(weight) == x.shape[1]
        arguments = self._arguments(x, x, weight, eps, bias)
        arguments.residual, arguments.factor, arguments.total = residual.data_ptr(), factor, address(total)
        if after is not None:
            arguments.after, arguments.after_dtype = after.weight.data_ptr(), dtype_code(after.weight.dtype)
            arguments.after_eps = after.eps
        call(self._library, x, arguments)
        return x, residual

    def rms_norm_columns(self, x: Array, first: int, weight: Array, eps: float) -> None:
        place = x.data_ptr() + first * x.dtype.itemsize
        arguments = NormArgs(
            x=place,
            y=place,
            stride=x.stride(0),
            weight=weight.data_ptr(),
            weight_dtype=dtype_code(weight.dtype),
            dtype=dtype_code(x.dtype),
            columns=len(weight),
            eps=eps,
            factor=1.0,
            groups=1,
        )
        call(self._library, x, arguments)

    def _arguments(self, x: Array, out: Array, weight: Array, eps: float, bias: Array | None) -> NormArgs:
        assert x.dim() == 2
        assert x.is_contiguous()
        assert bias is None or (bias.dtype, bias.shape) == (weight.dtype, weight.shape)
        return NormArgs(
            x=x.data_ptr(),
            y=out.data_ptr(),
            stride=x.shape[1],
            weight=weight.data_ptr(),
            weight_dtype=dtype_code(weight.dtype),
            dtype=dtype_code(x.dtype),
            columns=len(weight),
            eps=eps,
            factor=1.0,
            groups=1,
            bias=address(bias),
        )
