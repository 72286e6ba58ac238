"""Quantization of weights by the native kernels (`csrc/quantize.cpp`)."""

from ctypes import c_int32
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.weight_formats import WeightFormat
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.quantize import zero_units
from penstock.native import Library, array_address, dtype_code, supports


class QuantizeKernels:
    """See `penstock.kernels.ops.Ops` for the method."""

    def __init__(self, library: Library) -> None:
        self._function = library.function("penstock_quantize", "iiipillpppp", restype=c_int32)

    def quantize(self, weight: NDArray[Any], format: WeightFormat) -> Quantized | None:
        weight = np.ascontiguousarray(weight if supports(weight.dtype) else weight.astype(np.float32))
        rows, columns = weight.shape
        groups = (rows, format.num_groups(columns))
        values, scales = np.empty(weight.shape, np.uint8), np.empty(groups, np.uint8)
        units = zero_units(format)
        zeros = np.empty(groups, np.uint8) if units else None
        steps = np.empty((rows, 1), np.float32)
        parts = (array_address(values), array_address(scales), array_address(zeros), array_address(steps))
        source = (array_address(weight), dtype_code(weight.dtype), rows, columns)
        refused = self._function(format.bits, format.group, units, *source, *parts)
        return None if refused else Quantized(values, scales, zeros, steps)
