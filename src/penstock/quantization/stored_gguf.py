"""Matrices of GGUF files, each of a type of its own."""

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from penstock.kernels.linear.weight import Weight
from penstock.quantization.base import FloatRows, Parameter
from penstock.quantization.scheme import GGUFScheme
from penstock.weight_formats import WeightFormat


class StoredGGUF:
    """The matrices as the file has them."""

    def __init__(self, scheme: GGUFScheme) -> None:
        self._scheme = scheme

    def format_of(self, name: str) -> WeightFormat:
        return self._scheme.format_of(name)

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": GGUFRows(self._scheme.types[name], weight, first, count)}


class GGUFRows(FloatRows):
    """Rows of a matrix, which come as blocks of its type: uint8 [n, bytes of a row]."""

    def __init__(self, type: str, weight: Weight, first: int, count: int) -> None:
        super().__init__(weight, first, count)
        self._type = type

    def load(self, first: int, rows: Tensor) -> None:
        if rows.dtype == torch.uint8:
            rows = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[self._type]))
        super().load(first, rows)
