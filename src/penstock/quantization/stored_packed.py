"""Loads checkpoints written by `penstock quantize`: pack-quantized matrices that kernel formats represent exactly.

See `quantizer/packed.py` for the layout. Embedding and output projection are stored in floating point, because other
engines cannot read them quantized, and are quantized on loading.
"""

import re

import torch
from torch import Tensor

from penstock.config.recipes import EMBEDDINGS, PACKED
from penstock.errors import CheckpointError
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.ops import Ops
from penstock.quantization.base import Parameter
from penstock.quantization.nibbles import unpack_columns, unpack_rows
from penstock.quantization.parts import FLOATS, CheckedTensor, TensorPart, tensor_group
from penstock.quantization.rounding import RowsToRound
from penstock.quantization.rows import Fillable
from penstock.quantization.scheme import PackedScheme
from penstock.quantization.stored import StoredMatrices

_MOST_MULTIPLES = 255


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
            "weight_packed": TensorPart((count, weight.columns * kind.bits // 32), (torch.int32,)),
            "weight_scale": TensorPart((count, groups), FLOATS),
        }
        if not kind.symmetric:
            parts["weight_zero_point"] = TensorPart((count * kind.bits // 32, groups), (torch.int32,))

        def finish(tensors: dict[str, Tensor]) -> None:
            words = tensors["weight_packed"]
            values = unpack_columns(words) if kind.bits == 4 else words.view(torch.uint8) - kind.shift
            zeros = None if kind.symmetric else unpack_rows(tensors["weight_zero_point"]).T
            offsets = None if zeros is None else (zeros * weight.format.values_per_zero).contiguous()
            weight.load(first, Quantized(values, *_multiples(tensors["weight_scale"].float(), offsets)))

        shape = CheckedTensor(torch.tensor([count, weight.columns]), f"is not [{count}, {weight.columns}]")
        named = {"weight_shape": shape, **tensor_group(parts, finish)}
        return {f"{name}.{part}": parameter for part, parameter in named.items()}


def _multiples(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Split scales into multiples of one power of two per row: (multiples uint8, `offsets`, steps [rows, 1])."""
    _, exponent = torch.frexp(scales.amax(1, keepdim=True))
    step = torch.exp2((exponent - 8).float())
    multiples = scales / step
    exact = (multiples == multiples.round()) & (multiples >= 1) & (multiples <= _MOST_MULTIPLES)
    if not bool(exact.all()):
        raise CheckpointError(
            "belongs to a matrix whose scales are not multiples of one power of two per row, as `penstock quantize` "
            "writes them; remove penstock_quantization from config.json if another program wrote them"
        )
    return multiples.to(torch.uint8), offsets, step
