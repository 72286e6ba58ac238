"""Which method stores a model's weights."""

from penstock.config import WeightKind
from penstock.quantization.base import Method, Unquantized
from penstock.quantization.rounding import RoundToInt4, RoundToInt8


def make_method(kind: WeightKind) -> Method:
    """The method that brings a checkpoint in floating point to weights of this kind."""
    if kind == "int8":
        return RoundToInt8()
    return RoundToInt4() if kind == "int4" else Unquantized()
