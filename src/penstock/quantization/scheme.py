"""How a checkpoint stores the matrices of its layers, where not in the model's dtype. Plain data, no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.recipes import EMBEDDINGS, ROUTERS, Recipe
from penstock.weight_formats import FLOAT, FORMATS, WeightFormat

HINT = "penstock_quantization"
"""Key of config.json that says what only Penstock makes use of in a checkpoint that it quantized."""

StoredFormat = Literal["gptq", "gptq_v2", "awq", "int-quantized", "pack-quantized"]

_NEVER_QUANTIZED = re.compile(f"{EMBEDDINGS}|{ROUTERS}")
"""Names of what no FP8 or MXFP4 checkpoint quantizes, and not all of them say so: embeddings, routers of experts."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Integers, by `quantization_config` of `config.json`; the last two formats are those of compressed-tensors."""

    format: StoredFormat
    group_size: int | None = None
    """Columns that share a scale; None: all of a row."""
    symmetric: bool = True
    """Of pack-quantized: it stores no zeros."""

    def format_of(self, name: str) -> WeightFormat:
        """How the matrix `name` is kept: embedding and output projection are stored in floating point."""
        if re.fullmatch(EMBEDDINGS, name):
            return FLOAT
        if self.format == "int-quantized":
            return FORMATS["int8"]
        small = self.group_size is not None and self.group_size % FORMATS["int4_zero_128"].group
        return FORMATS["int4_zero" if small else "int4_zero_128"]


@dataclass(frozen=True, slots=True)
class GGUFScheme:
    """The types of the matrices of a GGUF file; at least one is quantized."""

    types: Mapping[str, str]
    """ggml's name of the type, by the matrix's name."""
    format: str = "GGUF"

    def format_of(self, name: str) -> WeightFormat:
        """How the matrix `name` is kept; one that is made of several tensors, in floating point."""
        return FORMATS[GGUF_FORMATS[self.types.get(name, "F32")]]


GGUF_FORMATS: dict[str, str] = {
    **dict.fromkeys(("F32", "F16", "BF16"), "float"),
    **{type: type.lower() for type in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")},
    "Q2_K": "int4_16",
    "Q3_K": "int4_16",
    "IQ4_NL": "q8_0",
    "IQ4_XS": "int8_k",
}
"""The format that holds each of ggml's types without loss."""


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """What `penstock quantize` writes: pack-quantized, in groups whose scales are multiples of a power of two a row.

    So the kernels hold the layers' matrices in formats of their own, exactly.
    """

    layers: Recipe
    """Of the layers' matrices."""
    embeddings: str
    """Format that embedding and output projection are rounded to, which are stored in floating point."""
    format: StoredFormat = "pack-quantized"

    def format_of(self, name: str) -> WeightFormat:
        """How the matrix `name` is kept."""
        return FORMATS[self.embeddings] if re.fullmatch(EMBEDDINGS, name) else self.layers.format_of(name)


@dataclass(frozen=True, slots=True)
class Float8Scheme:
    """FP8 (e4m3) with float32 or bfloat16 scales."""

    scale_per: Literal["tensor", "row", "block"]
    """What has a scale of its own; a block is `BLOCK` rows of as many columns."""
    scale_name: Literal["weight_scale", "weight_scale_inv"]
    """Of the scales' tensor, below the matrix. Both are what the values are multiplied by."""
    ignored: re.Pattern[str] | None = None
    """Matrices that are stored in floating point, beside embeddings and routers."""
    format: str = "FP8"

    BLOCK: ClassVar[int] = 128

    def format_of(self, name: str) -> WeightFormat:
        """How the matrix `name` is kept."""
        return FLOAT if _is_ignored(name, self.ignored) else FORMATS["fp8"]


@dataclass(frozen=True, slots=True)
class MXFP4Scheme:
    """MXFP4 (e2m1 by 32 columns, scales that are powers of two), in one of two layouts; see `stored_mxfp4.py`."""

    layout: Literal["blocks", "packed"]
    """Of gpt-oss, or of compressed-tensors."""
    ignored: re.Pattern[str] | None = None
    """Matrices that are stored in floating point, beside embeddings and routers."""
    format: str = "MXFP4"

    def format_of(self, name: str) -> WeightFormat:
        """How the matrix `name` is kept."""
        return FLOAT if _is_ignored(name, self.ignored) else FORMATS["mxfp4"]


def _is_ignored(name: str, ignored: re.Pattern[str] | None) -> bool:
    return bool(_NEVER_QUANTIZED.fullmatch(name) or (ignored is not None and ignored.match(name)))


StoredScheme = Scheme | PackedScheme | GGUFScheme | Float8Scheme | MXFP4Scheme
"""How a checkpoint stores its matrices."""
