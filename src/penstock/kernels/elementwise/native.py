"""Row-wise operations by the native kernels: gather, scale and sums (`csrc/gather.cpp`), columns (`csrc/columns.cpp`),
gates (`csrc/gate.cpp`, `csrc/head_gates.cpp`) and normalization (`csrc/norm.cpp`)."""

import torch
from torch import Tensor

from penstock.config.feed_forward import Activation
from penstock.kernels.elementwise import Columns, NormWeight
from penstock.kernels.linear.native import activation_code
from penstock.native import Library, address, dtype_code
from penstock.native.program import call, empty_rows
from penstock.native.structs import (
    AddArgs,
    ColumnsArgs,
    GateArgs,
    GatherArgs,
    HeadGatesArgs,
    NormArgs,
    ScaleArgs,
)


class ElementwiseKernels:
    """See `penstock.kernels.ops.Ops` for the methods."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def gather(self, table: Tensor, row_ids: Tensor) -> Tensor:
        assert row_ids.dtype == torch.int64
        assert row_ids.is_contiguous()
        assert table.is_contiguous()
        out = empty_rows(row_ids, tuple(table.shape[1:]), table.dtype)
        arguments = GatherArgs(
            table=table.data_ptr(),
            row_bytes=table.stride(0) * table.itemsize,
            row_ids=row_ids.data_ptr(),
            y=out.data_ptr(),
        )
        call(self._library, row_ids, arguments)
        return out

    def copy_columns(self, x: Tensor, out: Tensor, columns: Columns) -> None:
        assert x.dtype == out.dtype
        assert x.stride(1) == out.stride(1) == 1
        arguments = ColumnsArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=out.data_ptr(),
            y_stride=out.stride(0),
            dtype=dtype_code(x.dtype),
            paired=columns.paired,
            first=columns.first,
            to=columns.to,
            count=columns.count,
            heads=columns.heads,
            step=columns.step,
            to_step=columns.to_step,
        )
        call(self._library, x, arguments)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        assert x.dim() == 2
        assert x.is_contiguous()
        arguments = ScaleArgs(x=x.data_ptr(), dtype=dtype_code(x.dtype), columns=x.shape[1], factor=factor)
        call(self._library, x, arguments)
        return x

    def add_rows(self, x: Tensor, residual: Tensor, factor: float, *, total: Tensor | None = None) -> Tensor:
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

    def gate(self, x: Tensor, others: Tensor, first: int, activation: Activation) -> Tensor:
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

    def head_gates(self, x: Tensor, query: Tensor, num_heads: int) -> Tensor:
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


class NormKernels:
    """See `penstock.kernels.ops.Ops` for the methods; `x` [rows, size] is contiguous, results are rounded once."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None, groups: int = 1) -> Tensor:
        assert groups * len(weight) == x.shape[1]
        out = empty_rows(x, (x.shape[1],), x.dtype)
        arguments = self._arguments(x, out, weight, eps, bias)
        arguments.groups = groups
        call(self._library, x, arguments)
        return out

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        factor: float,
        *,
        bias: Tensor | None = None,
        after: NormWeight | None = None,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
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

    def rms_norm_columns(self, x: Tensor, first: int, weight: Tensor, eps: float) -> None:
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

    def _arguments(self, x: Tensor, out: Tensor, weight: Tensor, eps: float, bias: Tensor | None) -> NormArgs:
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
