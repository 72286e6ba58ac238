"""Loads checkpoints written by `penstock quantize`: pack-quantized matrices that kernel formats represent exactly.

See `quantizer/packed.py` for the layout. Embedding and output projection are stored in floating point, because other
engines cannot read them quantized, and are quantized on loading.
"""

import re

import numpy as np
from numpy.typing import NDArray

from penstock.config.recipes import EMBEDDINGS, PACKED
from penstock.errors import CheckpointError
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.ops import Ops
from penstock.quantization.nibbles import Bytes, unpack_columns, unpack_rows
from penstock.quantization.parts import FLOATS, CheckedTensor, TensorPart, Tensors, tensor_group
from penstock.quantization.rounding import RowsToRound
from penstock.quantization.rows import Fillable, Parameter
from penstock.quantization.scheme import PackedScheme
from penstock.quantization.stored import StoredMatrices

_MOST_MULTIPLES = 255
Floats = NDArray[np.float32]


class StoredPacked(StoredMatrices[PackedScheme]):
    """Loads the layers' matrices without rounding; quantizes embedding and output projection."""

    def __init__(self, scheme: PackedScheme, ops: Ops) -> None:
        super().__init__(scheme)
        self._ops = ops

    def _quantized(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        if re.fullmatch(EMBEDDINGS, name):
            return {f"{name}.weight": RowsToRound(self._ops, weight, first, count)}
        kind = PACKED[weight.format.name]
        groups = weight.columns // kind.group
        parts = {
            "weight_packed": TensorPart((count, weight.columns * kind.bits // 32), ("int32",)),
            "weight_scale": TensorPart((count, groups), FLOATS),
        }
        if not kind.symmetric:
            parts["weight_zero_point"] = TensorPart((count * kind.bits // 32, groups), ("int32",))

        def finish(tensors: Tensors) -> None:
            words = tensors["weight_packed"]
            values = (
                unpack_columns(words)
                if kind.bits == 4
                else np.ascontiguousarray(words).view(np.uint8) - np.uint8(kind.shift)
            )
            zeros = None if kind.symmetric else unpack_rows(tensors["weight_zero_point"]).T
            offsets = None if zeros is None else zeros * np.uint8(weight.format.values_per_zero)
            weight.load(first, Quantized(values, *_multiples(tensors["weight_scale"].astype(np.float32), offsets)))

        shape = CheckedTensor(np.array([count, weight.columns]), f"is not [{count}, {weight.columns}]")
        named = {"weight_shape": shape, **tensor_group(parts, finish)}
        return {f"{name}.{part}": parameter for part, parameter in named.items()}


def _multiples(scales: Floats, offsets: Bytes | None) -> tuple[Bytes, Bytes | None, Floats]:
    """Split scales into multiples of one power of two per row: (multiples uint8, `offsets`, steps [rows, 1])."""
    _, exponent = np.frexp(scales.max(1, keepdims=True))
    with np.errstate(all="ignore"):  # scales that are not finite are refused below
        step = np.ldexp(np.float32(1), exponent - 8)
        multiples = scales / step
        exact = (multiples == np.rint(multiples)) & (multiples >= 1) & (multiples <= _MOST_MULTIPLES)
    if not bool(exact.all()):
        raise CheckpointError(
            "belongs to a matrix whose scales are not multiples of one power of two per row, as `penstock quantize` "
            "writes them; remove penstock_quantization from config.json if another program wrote them"
        )
    return multiples.astype(np.uint8), offsets, step
