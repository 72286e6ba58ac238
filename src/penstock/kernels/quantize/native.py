"""Weights to integers by the native kernels, `csrc/quantize.cpp`."""

from ctypes import c_int64

import torch
from torch import Tensor

from penstock.kernels.quantize import GROUP, Int4, Int6, Int8
from penstock.native import Library, address, dtype_code, supports

_INT8, _INT4, _INT6 = 2, 3, 6  # WeightKind in ops.h


class QuantizeKernels:
    """See `penstock.kernels.ops.Ops` for the methods. A weight lies in the CPU's memory."""

    def __init__(self, library: Library) -> None:
        self._function = library.function("penstock_quantize", "ipillppp", restype=c_int64)

    def quantize_int8(self, weight: Tensor) -> Int8 | None:
        made = Int8(torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight)))
        return made if self._quantize(_INT8, weight, made.q, made.scale, None) else None

    def quantize_int6(self, weight: Tensor) -> Int6 | None:
        scales = torch.empty(len(weight), -(-weight.shape[1] // GROUP))
        made = Int6(torch.empty(weight.shape, dtype=torch.int8), scales)
        return made if self._quantize(_INT6, weight, made.q, made.scale, None) else None

    def quantize_int4(self, weight: Tensor) -> Int4 | None:
        shape = (len(weight), -(-weight.shape[1] // GROUP))
        q, zero = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(shape, dtype=torch.uint8)
        made = Int4(q, torch.empty(shape), zero)
        return made if self._quantize(_INT4, weight, made.q, made.scale, made.zero) else None

    def _quantize(self, kind: int, weight: Tensor, q: Tensor, scale: Tensor, zero: Tensor | None) -> bool:
        weight = (weight if supports(weight.dtype) else weight.float()).contiguous()
        rows, columns = weight.shape
        addresses = (address(q), address(scale), address(zero))
        done: int = self._function(kind, address(weight), dtype_code(weight.dtype), rows, columns, *addresses)
        return done == rows
