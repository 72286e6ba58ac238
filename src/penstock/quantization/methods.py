"""Selects the quantization method of a model's weights, and imports that method alone."""

from penstock.config.recipes import RECIPES
from penstock.kernels.ops import Ops
from penstock.quantization.base import Method, Unquantized
from penstock.quantization.scheme import Float8Scheme, GGUFScheme, MXFP4Scheme, PackedScheme, StoredScheme


def make_method(recipe: str | None, scheme: StoredScheme | None, ops: Ops) -> Method:
    """The method that loads the checkpoint's format into the kernels' weights.

    Args:
        recipe: name of the recipe that floating-point weights are quantized with on loading; None: they are not.
        scheme: the checkpoint's storage format; None: floating point.
    """
    if scheme is None:
        if recipe is None:
            return Unquantized()
        from penstock.quantization.rounding import Rounding

        return Rounding(RECIPES[recipe], ops)
    if isinstance(scheme, GGUFScheme):
        from penstock.quantization.stored_gguf import StoredGGUF

        return StoredGGUF(scheme)
    if isinstance(scheme, PackedScheme):
        from penstock.quantization.stored_packed import StoredPacked

        return StoredPacked(scheme, ops)
    if isinstance(scheme, Float8Scheme):
        from penstock.quantization.stored_float8 import StoredFloat8

        return StoredFloat8(scheme)
    if isinstance(scheme, MXFP4Scheme):
        from penstock.quantization.stored_mxfp4 import StoredMXFP4

        return StoredMXFP4(scheme)
    if scheme.format == "int-quantized":
        from penstock.quantization.stored_int8 import StoredInt8

        return StoredInt8(scheme)
    from penstock.quantization.stored_int4 import StoredInt4

    return StoredInt4(scheme)
