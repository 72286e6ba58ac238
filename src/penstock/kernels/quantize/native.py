"""Quantization of weights by the native kernels (`csrc/quantize.cpp`)."""

from ctypes import c_int32

import torch
from torch import Tensor

from penstock.config.weight_formats import WeightFormat
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.quantize.reference import zero_units
from penstock.native import Library, address, dtype_code, supports


class QuantizeKernels:
    """See `penstock.kernels.ops.Ops` for the method. Weights must be in CPU memory."""

    def __init__(self, library: Library) -> None:
        self._function = library.function("penstock_quantize", "iiipillpppp", restype=c_int32)

    def quantize(self, weight: Tensor, format: WeightFormat) -> Quantized | None:
        weight = (weight if supports(weight.dtype) else weight.float()).contiguous()
        rows, columns = weight.shape
        groups = (rows, format.num_groups(columns))
        values, scales = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(groups, dtype=torch.uint8)
        units = zero_units(format)
        zeros = torch.empty(groups, dtype=torch.uint8) if units else None
        steps = torch.empty(rows, 1)
        parts = (address(values), address(scales), address(zeros), address(steps))
        source = (address(weight), dtype_code(weight.dtype), rows, columns)
        refused = self._function(format.bits, format.group, units, *source, *parts)
        return None if refused else Quantized(values, scales, zeros, steps)
