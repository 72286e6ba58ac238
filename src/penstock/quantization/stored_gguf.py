"""Loads matrices of GGUF files, each with its own ggml type."""

import numpy as np
from numpy.typing import NDArray

from penstock.quantization.rows import Fillable, Parameter
from penstock.quantization.scheme import GGUFScheme
from penstock.quantization.stored import StoredMatrices


class StoredGGUF(StoredMatrices[GGUFScheme]):
    """Loads the matrices of a GGUF file without rounding."""

    def _quantized(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {
            f"{name}.weight": GGUFRows(
                self._scheme.types[name], weight, first, count, self._scheme.scales.get(name, 1.0)
            )
        }


class GGUFRows:
    """Rows of a quantized matrix, loaded as blocks of its ggml type: uint8 [n, row_bytes]."""

    def __init__(self, type: str, weight: Fillable, first: int, count: int, scale: float) -> None:
        """
        Args:
            scale: that of the matrix, for NVFP4.
        """
        self.shape: tuple[int, ...] = (count, weight.columns)
        self._type, self._weight, self._first, self._scale = type, weight, first, scale

    def load(self, first: int, rows: NDArray[np.uint8]) -> None:
        from penstock.quantization.gguf_blocks import quantized_rows  # here: cached weights are not unpacked

        self._weight.load(self._first + first, quantized_rows(self._type, rows, self._scale))
