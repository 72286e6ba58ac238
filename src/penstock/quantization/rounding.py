"""Weights in floating point, rounded to integers as they are loaded: `--quantization int8` or `int4`."""

from typing import TypeVar

from torch import Tensor

from penstock.errors import CheckpointError
from penstock.kernels.linear.weight import Weight
from penstock.kernels.ops import Ops
from penstock.memory import WeightKind
from penstock.quantization.base import FloatRows, Parameter

REFUSED = "cannot be quantized: it has weights that are infinite, not numbers or far too large"

Rounded = TypeVar("Rounded")


class RowsToRound(FloatRows):
    """Rows of a weight that the checkpoint holds as floating point and the kernel as integers."""

    def __init__(self, ops: Ops, weight: Weight, first: int, count: int) -> None:
        super().__init__(weight, first, count)
        self._ops = ops


class Int8Rows(RowsToRound):
    """Rows of an int8 weight that the checkpoint holds as floating point."""

    def load(self, first: int, rows: Tensor) -> None:
        made = _checked(self._ops.quantize_int8(rows))
        self._weight.load_int8(self._first + first, made.q, made.scale)


class Int6Rows(RowsToRound):
    """Rows of an int6 weight that the checkpoint holds as floating point."""

    def load(self, first: int, rows: Tensor) -> None:
        made = _checked(self._ops.quantize_int6(rows))
        self._weight.load_int6(self._first + first, made.q, made.scale)


class Int4Rows(RowsToRound):
    """Rows of an int4 weight that the checkpoint holds as floating point."""

    def load(self, first: int, rows: Tensor) -> None:
        made = _checked(self._ops.quantize_int4(rows))
        self._weight.load_int4(self._first + first, made.q, made.scale, made.zero)


def _checked(made: Rounded | None) -> Rounded:
    if made is None:
        raise CheckpointError(REFUSED)
    return made


class RoundToInt8:
    """All matrices in 8 bits."""

    kind: WeightKind = "int8"
    head_kind: WeightKind = "int8"

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": Int8Rows(self._ops, weight, first, count)}

    def head_parameters(self, weight: Weight, name: str) -> dict[str, Parameter]:
        return {f"{name}.weight": Int8Rows(self._ops, weight, 0, weight.rows)}


class RoundToInt4:
    """The layers' matrices in 4 bits; the output projection, on which every token depends directly, in 6."""

    kind: WeightKind = "int4"
    head_kind: WeightKind = "int6"

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": Int4Rows(self._ops, weight, first, count)}

    def head_parameters(self, weight: Weight, name: str) -> dict[str, Parameter]:
        return {f"{name}.weight": Int6Rows(self._ops, weight, 0, weight.rows)}
