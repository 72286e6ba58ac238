"""Loads checkpoints in the int-quantized format of compressed-tensors: int8 with one scale per row or per matrix."""

import numpy as np

from penstock.errors import CheckpointError
from penstock.kernels.linear.quantized import Quantized
from penstock.quantization.parts import FLOATS, TensorPart, Tensors, tensor_group
from penstock.quantization.rows import Fillable, Parameter
from penstock.quantization.scheme import Scheme
from penstock.quantization.stored import StoredMatrices


class StoredInt8(StoredMatrices[Scheme]):
    """Loads int8 matrices without rounding; embedding and output projection are floating point."""

    def _quantized(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        def finish(tensors: Tensors) -> None:
            scales = np.broadcast_to(tensors[f"{name}.weight_scale"].astype(np.float32), (count, 1))
            if not bool(np.isfinite(scales).all()):
                raise CheckpointError("belongs to a matrix whose scales are not finite")
            values = tensors[f"{name}.weight"].view(np.uint8) ^ np.uint8(128)
            ones = np.ones((count, weight.format.num_groups(weight.columns)), np.uint8)
            weight.load(first, Quantized(values, ones, super_scales=scales))

        parts = {
            f"{name}.weight": TensorPart((count, weight.columns), ("int8",)),
            f"{name}.weight_scale": TensorPart((1,) if self._scheme.per_tensor else (count, 1), FLOATS),
        }
        return tensor_group(parts, finish)
