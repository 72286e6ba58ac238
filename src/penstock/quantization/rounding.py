"""Quantizes floating-point weights on loading: `--quantization int8` or `int4`."""

from typing import Any

from numpy.typing import NDArray

from penstock.config.recipes import Recipe
from penstock.config.weight_formats import FLOAT, WeightFormat
from penstock.errors import CheckpointError
from penstock.kernels.ops import Ops
from penstock.quantization.base import REFUSED
from penstock.quantization.parameters import FloatRows
from penstock.quantization.rows import Fillable, Parameter


class RowsToRound(FloatRows):
    """Rows of a weight that is floating point in the checkpoint and quantized in the kernel."""

    def __init__(self, ops: Ops, weight: Fillable, first: int, count: int) -> None:
        super().__init__(weight, first, count)
        self._ops = ops

    def load(self, first: int, rows: NDArray[Any]) -> None:
        made = self._ops.quantize(rows, self.weight.format)
        if made is None:
            raise CheckpointError(REFUSED)
        self.weight.load(self.first + first, made)


class Rounding:
    """Quantizes matrices to the formats of a recipe."""

    quantizes_on_load = True

    def __init__(self, recipe: Recipe, ops: Ops) -> None:
        self._recipe, self._ops = recipe, ops

    def format_of(self, name: str) -> WeightFormat:
        return self._recipe.format_of(name)

    def parameters(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        if weight.format is FLOAT:
            return {f"{name}.weight": FloatRows(weight, first, count)}
        return {f"{name}.weight": RowsToRound(self._ops, weight, first, count)}
