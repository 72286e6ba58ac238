"""How a checkpoint stores the matrices of its layers, where it does not as floating point. Plain data, no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.recipes import EMBEDDINGS, Recipe
from penstock.weight_formats import FLOAT, FORMATS, WeightFormat

HINT = "penstock_quantization"
"""Key of config.json that says what only Penstock makes use of in a checkpoint that it quantized."""

StoredFormat = Literal["gptq", "gptq_v2", "awq", "int-quantized", "pack-quantized"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """What `config.json` says under `quantization_config`; the last two formats are those of compressed-tensors."""

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
    """The types of the matrices of a GGUF file, of which at least one is quantized."""

    types: Mapping[str, str]
    """ggml's name of the type, by the matrix's name."""
    format: str = "GGUF"

    def format_of(self, name: str) -> WeightFormat:
        """How the matrix `name` is kept."""
        return FORMATS[GGUF_FORMATS[self.types[name]]]


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
