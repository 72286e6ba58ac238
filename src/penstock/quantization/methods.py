"""Selects the quantization method of a model's weights."""

from penstock.config.recipes import RECIPES
from penstock.kernels.ops import Ops
from penstock.quantization.base import Method, Unquantized
from penstock.quantization.rounding import Rounding
from penstock.quantization.scheme import Float8Scheme, GGUFScheme, MXFP4Scheme, PackedScheme, StoredScheme
from penstock.quantization.stored_float8 import StoredFloat8
from penstock.quantization.stored_gguf import StoredGGUF
from penstock.quantization.stored_int4 import StoredInt4
from penstock.quantization.stored_int8 import StoredInt8
from penstock.quantization.stored_mxfp4 import StoredMXFP4
from penstock.quantization.stored_packed import StoredPacked


def make_method(recipe: str | None, scheme: StoredScheme | None, ops: Ops) -> Method:
    """The method that loads the checkpoint's format into the kernels' weights.

    Args:
        recipe: name of the recipe that floating-point weights are quantized with on loading; None: they are not.
        scheme: the checkpoint's storage format; None: floating point.
    """
    if isinstance(scheme, GGUFScheme):
        return StoredGGUF(scheme)
    if isinstance(scheme, PackedScheme):
        return StoredPacked(scheme, ops)
    if isinstance(scheme, Float8Scheme):
        return StoredFloat8(scheme)
    if isinstance(scheme, MXFP4Scheme):
        return StoredMXFP4(scheme)
    if scheme is not None:
        return StoredInt8(scheme) if scheme.format == "int-quantized" else StoredInt4(scheme)
    return Unquantized() if recipe is None else Rounding(RECIPES[recipe], ops)
