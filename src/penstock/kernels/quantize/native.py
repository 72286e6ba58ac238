"""The native version: `csrc/quantize.cpp`."""

from ctypes import c_int64

import torch
from torch import Tensor

from penstock.kernels.linear.weight import GROUP
from penstock.kernels.quantize.reference import Int4, Int6, Int8
from penstock.native import address, dtype_code, library, supports

_INT8, _INT4, _INT6 = 2, 3, 6  # WeightKind in ops.h


def takes(weight: Tensor) -> bool:
    """Whether the library can quantize it: it was built, runs on this machine and knows the type."""
    return weight.device.type == "cpu" and supports(weight.dtype) and library() is not None


def quantize_int8(weight: Tensor) -> Int8 | None:
    """As `reference.quantize_int8`, for a weight that it `takes`."""
    made = Int8(torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight)))
    return made if _quantize(_INT8, weight, made.q, made.scale, None) else None


def quantize_int6(weight: Tensor) -> Int6 | None:
    """As `reference.quantize_int6`, for a weight that it `takes`."""
    scales = torch.empty(len(weight), -(-weight.shape[1] // GROUP))
    made = Int6(torch.empty(weight.shape, dtype=torch.int8), scales)
    return made if _quantize(_INT6, weight, made.q, made.scale, None) else None


def quantize_int4(weight: Tensor) -> Int4 | None:
    """As `reference.quantize_int4`, for a weight that it `takes`."""
    shape = (len(weight), -(-weight.shape[1] // GROUP))
    q, zero = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(shape, dtype=torch.uint8)
    made = Int4(q, torch.empty(shape), zero)
    return made if _quantize(_INT4, weight, made.q, made.scale, made.zero) else None


def _quantize(kind: int, weight: Tensor, q: Tensor, scale: Tensor, zero: Tensor | None) -> bool:
    native = library()
    assert native is not None, "the caller asks `takes` first"
    weight = weight.contiguous()
    call = native.function("penstock_quantize", "ipillppp", restype=c_int64)
    rows, columns = weight.shape
    addresses = (address(q), address(scale), address(zero))
    done: int = call(kind, address(weight), dtype_code(weight.dtype), rows, columns, *addresses)
    return done == rows
