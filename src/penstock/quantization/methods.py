"""Which method stores a model's weights."""

from penstock.kernels.ops import Ops
from penstock.quantization.base import Method, Unquantized
from penstock.quantization.rounding import Rounding
from penstock.quantization.scheme import PackedScheme, Scheme
from penstock.quantization.stored_int4 import StoredInt4
from penstock.quantization.stored_int8 import StoredInt8
from penstock.quantization.stored_packed import StoredPacked
from penstock.recipes import RECIPES


def make_method(recipe: str | None, scheme: Scheme | PackedScheme | None, ops: Ops) -> Method:
    """The method that brings what the checkpoint stores (`scheme`; None: floating point) to the kernels' weights.

    `recipe` is the name of what floating point is rounded to, if it is.
    """
    if isinstance(scheme, PackedScheme):
        return StoredPacked(scheme, ops)
    if scheme is not None:
        return StoredInt8(scheme) if scheme.format == "int-quantized" else StoredInt4(scheme)
    return Unquantized() if recipe is None else Rounding(RECIPES[recipe], ops)
