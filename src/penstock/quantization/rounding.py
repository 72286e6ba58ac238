"""Weights in floating point, rounded to integers as they are loaded: `--quantization int8` or `int4`."""

from torch import Tensor

from penstock.kernels.linear import Weight
from penstock.kernels.quantize import quantize_int4, quantize_int6, quantize_int8
from penstock.memory import WeightKind
from penstock.quantization.base import FloatRows, Parameter


class Int8Rows(FloatRows):
    """Rows of an int8 weight that the checkpoint holds as floating point."""

    def load(self, first: int, rows: Tensor) -> None:
        made = quantize_int8(rows)
        self._weight.load_int8(self._first + first, made.q, made.scale)


class Int6Rows(FloatRows):
    """Rows of an int6 weight that the checkpoint holds as floating point."""

    def load(self, first: int, rows: Tensor) -> None:
        made = quantize_int6(rows)
        self._weight.load_int6(self._first + first, made.q, made.scale)


class Int4Rows(FloatRows):
    """Rows of an int4 weight that the checkpoint holds as floating point."""

    def load(self, first: int, rows: Tensor) -> None:
        made = quantize_int4(rows)
        self._weight.load_int4(self._first + first, made.q, made.scale, made.zero)


class RoundToInt8:
    """All matrices in 8 bits."""

    kind: WeightKind = "int8"
    head_kind: WeightKind = "int8"

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": Int8Rows(weight, first, count)}

    def head_parameters(self, weight: Weight, name: str) -> dict[str, Parameter]:
        return {f"{name}.weight": Int8Rows(weight, 0, weight.rows)}


class RoundToInt4:
    """The layers' matrices in 4 bits; the output projection, on which every token depends directly, in 6."""

    kind: WeightKind = "int4"
    head_kind: WeightKind = "int6"

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": Int4Rows(weight, first, count)}

    def head_parameters(self, weight: Weight, name: str) -> dict[str, Parameter]:
        return {f"{name}.weight": Int6Rows(weight, 0, weight.rows)}
