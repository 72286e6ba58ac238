"""Rows of a table, and rows times a number, by the native kernels, `csrc/gather.cpp`."""

import torch
from torch import Tensor

from penstock.native import Library, dtype_code
from penstock.native.program import Operation, call, empty_rows
from penstock.native.structs import GatherArgs, ScaleArgs


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
        call(self._library, row_ids, Operation.GATHER, arguments)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        assert x.dim() == 2
        assert x.is_contiguous()
        arguments = ScaleArgs(x=x.data_ptr(), dtype=dtype_code(x.dtype), columns=x.shape[1], factor=factor)
        call(self._library, x, Operation.SCALE, arguments)
        return x
