"""Loads checkpoints whose layers are stored in FP8 (e4m3) with scales that the values are multiplied by.

    compressed-tensors  weight [out, in]    weight_scale [1], [out, 1] or [out / 128, in / 128]
    fp8, fbgemm_fp8     weight [out, in]    weight_scale_inv or weight_scale, the same shapes; [] for a whole tensor

The kernels store the values unchanged, and a float32 scale for every 128 columns of a row: nothing is rounded.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CheckpointError
from penstock.kernels.linear.quantized import Quantized
from penstock.quantization.parts import FLOATS, TensorPart, Tensors, tensor_group
from penstock.quantization.rows import Fillable, Parameter
from penstock.quantization.scheme import Float8Scheme
from penstock.quantization.stored import StoredMatrices

_NOT_A_NUMBER = 0x7F
"""The lower 7 bits of e4m3's two NaN values."""


class StoredFloat8(StoredMatrices[Float8Scheme]):
    """Loads FP8 matrices without rounding."""

    def _quantized(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        values, scales = f"{name}.weight", f"{name}.{self._scheme.scale_name}"

        def finish(tensors: Tensors) -> None:
            weight.load(first, float8_rows(tensors[values], tensors[scales], self._scheme))

        blocks = -(-count // Float8Scheme.BLOCK), -(-weight.columns // Float8Scheme.BLOCK)
        shape = {"tensor": (1,), "row": (count, 1), "block": blocks}[self._scheme.scale_per]
        parts = {
            values: TensorPart((count, weight.columns), ("float8_e4m3fn",)),
            scales: TensorPart(shape, FLOATS),
        }
        return tensor_group(parts, finish)


def float8_rows(values: NDArray[Any], scales: NDArray[Any], scheme: Float8Scheme) -> Quantized:
    """Convert `values` [rows, columns] float8_e4m3fn with their scales to the kernels' format `fp8`.

    Raises:
        CheckpointError: a value is NaN, or a scale is not finite; the caller puts the tensor's name before the message.
    """
    bits, scales = values.view(np.uint8), scales.astype(np.float32)
    if bool((bits & _NOT_A_NUMBER == _NOT_A_NUMBER).any()):
        raise CheckpointError("belongs to a matrix with weights that are NaN")
    if not bool(np.isfinite(scales).all()):
        raise CheckpointError("belongs to a matrix whose scales are not finite")
    rows, groups = len(values), -(-values.shape[1] // Float8Scheme.BLOCK)
    if scheme.scale_per == "block":
        scales = np.repeat(scales, Float8Scheme.BLOCK, 0)[:rows]
    return Quantized(bits, np.broadcast_to(scales, (rows, groups)))
