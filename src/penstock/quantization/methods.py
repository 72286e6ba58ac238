"""Which method stores a model's weights."""

from penstock.kernels.ops import Ops
from penstock.memory import WeightKind
from penstock.quantization.base import Method, Unquantized
from penstock.quantization.rounding import RoundToInt4, RoundToInt8
from penstock.quantization.scheme import Scheme
from penstock.quantization.stored_int4 import StoredInt4
from penstock.quantization.stored_int8 import StoredInt8


def make_method(kind: WeightKind, scheme: Scheme | None, ops: Ops) -> Method:
    """The method that brings what the checkpoint stores (`scheme`; None: floating point) to weights of this kind."""
    if scheme is not None:
        return StoredInt8() if scheme.kind == "int8" else StoredInt4(scheme)
    if kind == "int8":
        return RoundToInt8(ops)
    return RoundToInt4(ops) if kind == "int4" else Unquantized()
