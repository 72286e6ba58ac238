"""Loads checkpoints in MXFP4: 4-bit values (e2m1) with one 8-bit exponent (E8M0) for every 32 columns.

    blocks   {name}_blocks [out, in / 32, 16]    {name}_scales [out, in / 32]        gpt-oss, per expert
    packed   {name}.weight_packed [out, in / 2]  {name}.weight_scale [out, in / 32]      compressed-tensors

All tensors are bytes. The lower nibble of a byte is the even column, the upper nibble the odd one (in GGUF, columns n
and n + 16). Source: Microscaling Formats specification of the Open Compute Project, version 1.0.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.config.weight_formats import FORMATS
from penstock.errors import CheckpointError
from penstock.kernels.linear.quantized import Quantized
from penstock.quantization.nibbles import Bytes, nibble_pairs
from penstock.quantization.parts import TensorPart, Tensors, tensor_group
from penstock.quantization.rows import Fillable, Parameter
from penstock.quantization.scheme import MXFP4Scheme
from penstock.quantization.stored import StoredMatrices

GROUP = FORMATS["mxfp4"].group
_BYTES = ("uint8",)
_NO_NUMBER = 255
"""The E8M0 value of NaN."""
_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1."""


class StoredMXFP4(StoredMatrices[MXFP4Scheme]):
    """Loads MXFP4 matrices without rounding."""

    def _quantized(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        if weight.columns % GROUP:
            raise CheckpointError(f"{name} has {weight.columns} columns; MXFP4 needs a multiple of {GROUP}")
        groups = weight.columns // GROUP
        if self._scheme.layout == "blocks":
            values, scales = f"{name}_blocks", f"{name}_scales"
            parts = {values: TensorPart((count, groups, GROUP // 2), _BYTES)}
        else:
            values, scales = f"{name}.weight_packed", f"{name}.weight_scale"
            parts = {values: TensorPart((count, weight.columns // 2), _BYTES)}

        def finish(tensors: Tensors) -> None:
            weight.load(first, mxfp4_rows(tensors[values], tensors[scales]))

        return tensor_group(parts | {scales: TensorPart((count, groups), _BYTES)}, finish)


def mxfp4_rows(values: Bytes, scales: Bytes) -> Quantized:
    """Convert rows to the kernels' format `mxfp4`.

    Args:
        values: uint8 [rows, ...], two columns per byte.
        scales: uint8 [rows, groups].

    Raises:
        CheckpointError: a scale is NaN; the caller puts the tensor's name before the message.
    """
    if bool((scales == _NO_NUMBER).any()):
        raise CheckpointError("belongs to a matrix with scales that are NaN")
    packed = values.reshape(len(values), -1)
    table = np.array([value + FORMATS["mxfp4"].centre for value in _VALUES], np.uint8)
    return Quantized(table[nibble_pairs(packed)], half_scales(scales))


def half_scales(exponents: Bytes) -> NDArray[Any]:
    """Half of the scales that E8M0 `exponents` encode."""
    exponent = exponents.astype(np.uint16)
    bits = np.where(exponent < 2, 0x20 << np.minimum(exponent, 1), (exponent - 1) << 7)  # subnormal or normal
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16)
