"""Rows of a table by the native kernel, `csrc/gather.cpp`."""

import ctypes

import torch
from torch import Tensor

from penstock import native
from penstock.native.program import Operation, call, empty_rows


class _GatherArgs(ctypes.Structure):
    """`GatherArgs` of `csrc/ops.h`."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("row_ids", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("y", ctypes.c_void_p),
    )


def takes(table: Tensor) -> bool:
    """Whether the kernel works on `table`."""
    return table.is_cpu and table.is_contiguous() and native.library() is not None


def gather(table: Tensor, row_ids: Tensor) -> Tensor:
    """See `penstock.kernels.gather`."""
    assert row_ids.dtype == torch.int64
    assert row_ids.is_contiguous()
    out = empty_rows(row_ids, tuple(table.shape[1:]), table.dtype)
    arguments = _GatherArgs(
        table=table.data_ptr(),
        row_bytes=table.stride(0) * table.itemsize,
        row_ids=row_ids.data_ptr(),
        y=out.data_ptr(),
    )
    call(row_ids, Operation.GATHER, arguments)
    return out
