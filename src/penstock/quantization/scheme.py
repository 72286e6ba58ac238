"""Storage formats of quantized checkpoints. Plain data, no torch."""

import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import ClassVar, Literal

from penstock.config.recipes import EMBEDDINGS, ROUTERS, Recipe
from penstock.config.weight_formats import FLOAT, FORMATS, WeightFormat
from penstock.dataclass import dataclass

HINT = "penstock_quantization"
"""Key of config.json that holds Penstock's own settings in checkpoints that it quantized."""

StoredFormat = Literal["gptq", "gptq_v2", "awq", "int-quantized", "pack-quantized"]

SCALES_OF_OTHERS = r".*\.(activation_scale|(input|output)_(scale|zero_point)|[qkv]_(scale|zero_point)|kv_scale)"
"""Stored scales of activations and of the KV cache, which the kernels compute themselves."""
_NEVER_QUANTIZED = re.compile(f"{EMBEDDINGS}|{ROUTERS}")
"""Matrices that no FP8 or MXFP4 checkpoint quantizes, whether its config lists them or not: embeddings and routers."""


@dataclass(frozen=True, slots=True)
class QuantizedModules:
    """The linear maps that a checkpoint quantizes. Its patterns are of names in the checkpoint."""

    targets: re.Pattern[str] | None = None
    """None: all of the layers."""
    ignored: re.Pattern[str] | None = None
    """Maps that it does not quantize, though they may be targets."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Replacements of name prefixes, as in `ModelNames`."""

    def has(self, name: str) -> bool:
        """Whether the matrix of this name in the model is quantized."""
        stored = [there + name.removeprefix(here) for there, here in self.prefixes if name.startswith(here)]
        names = [name, *stored]
        if self.ignored is not None and any(map(self.ignored.match, names)):
            return False
        return self.targets is None or any(map(self.targets.match, names))


ALL_MODULES = QuantizedModules()


@dataclass(frozen=True, slots=True)
class Scheme:
    """Integer formats; `int-quantized` and `pack-quantized` are those of compressed-tensors."""

    format: StoredFormat
    group_size: int | None = None
    """Columns that share a scale; None: whole rows."""
    symmetric: bool = True
    """GPTQ, pack-quantized: whether every zero point is 8, whatever is stored for it."""
    per_tensor: bool = False
    """int-quantized: whether a matrix has a single scale instead of one per row."""
    modules: QuantizedModules = ALL_MODULES

    def format_of(self, name: str) -> WeightFormat:
        """The kernel format of the matrix `name`; embedding and output projection are floating point."""
        if re.fullmatch(EMBEDDINGS, name) or not self.modules.has(name):
            return FLOAT
        if self.format == "int-quantized":
            return FORMATS["int8"]
        small = self.group_size is not None and self.group_size % FORMATS["int4_zero_128"].group
        return FORMATS["int4_zero" if small else "int4_zero_128"]


@dataclass(frozen=True, slots=True)
class GGUFScheme:
    """The ggml types of the matrices of a GGUF file; at least one is quantized."""

    types: Mapping[str, str]
    """ggml's type names, by matrix name."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Scales of NVFP4 matrices, by name; 1 if left out."""
    format: str = "GGUF"

    def format_of(self, name: str) -> WeightFormat:
        """The kernel format of the matrix `name`; a matrix computed from several tensors is floating point."""
        return FORMATS[GGUF_FORMATS[self.types.get(name, "F32")]]


GGUF_FORMATS: dict[str, str] = {
    **dict.fromkeys(("F32", "F16", "BF16"), "float"),
    **{type: type.lower() for type in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")},
    "Q2_K": "int4_16",
    "Q3_K": "int4_16",
    "IQ4_NL": "q8_0",
    "IQ4_XS": "int8_k",
    **dict.fromkeys(("IQ1_S", "IQ3_S"), "int4_wide"),
    **dict.fromkeys(("IQ1_M", "IQ3_XXS"), "int6_wide"),
    "IQ2_XXS": "int8_wide",
    **dict.fromkeys(("IQ2_XS", "IQ2_S"), "int8_wide_16"),
    "NVFP4": "nvfp4",
    **dict.fromkeys(("TQ1_0", "TQ2_0"), "int4_zero_128"),
}
"""The kernel format that represents each ggml type without loss."""


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """The format that `penstock quantize` writes: pack-quantized, with scales that are multiples of one power of two
    per row, so that the kernels' own formats represent the matrices exactly.
    """

    layers: Recipe
    """Formats of the layers' matrices."""
    embeddings: str
    """Format that embedding and output projection, stored in floating point, are quantized to on loading."""
    format: StoredFormat = "pack-quantized"

    def format_of(self, name: str) -> WeightFormat:
        """The kernel format of the matrix `name`."""
        return FORMATS[self.embeddings] if re.fullmatch(EMBEDDINGS, name) else self.layers.format_of(name)


@dataclass(frozen=True, slots=True)
class Float8Scheme:
    """FP8 (e4m3) with float32 or bfloat16 scales."""

    scale_per: Literal["tensor", "row", "block"]
    """Granularity of the scales; a block is `BLOCK` rows by `BLOCK` columns."""
    scale_name: Literal["weight_scale", "weight_scale_inv"]
    """Name of the scales' tensor, below the matrix. In both cases values are multiplied by the scales."""
    modules: QuantizedModules = ALL_MODULES
    """Embeddings and routers are stored in floating point in any case."""
    format: str = "FP8"

    BLOCK: ClassVar[int] = 128

    def format_of(self, name: str) -> WeightFormat:
        """The kernel format of the matrix `name`."""
        return FLOAT if _is_float(name, self.modules) else FORMATS["fp8"]


@dataclass(frozen=True, slots=True)
class MXFP4Scheme:
    """MXFP4 (e2m1 in groups of 32 columns with power-of-two scales), in one of two layouts; see `stored_mxfp4.py`."""

    layout: Literal["blocks", "packed"]
    """blocks: gpt-oss; packed: compressed-tensors."""
    modules: QuantizedModules = ALL_MODULES
    """Embeddings and routers are stored in floating point in any case."""
    format: str = "MXFP4"

    def format_of(self, name: str) -> WeightFormat:
        """The kernel format of the matrix `name`."""
        return FLOAT if _is_float(name, self.modules) else FORMATS["mxfp4"]


def _is_float(name: str, modules: QuantizedModules) -> bool:
    return bool(_NEVER_QUANTIZED.fullmatch(name)) or not modules.has(name)


def with_prefixes(scheme: "StoredScheme", prefixes: tuple[tuple[str, str], ...]) -> "StoredScheme":
    """The scheme of a model whose names have other prefixes in the checkpoint; see `ModelNames`."""
    if isinstance(scheme, (Scheme, Float8Scheme, MXFP4Scheme)):
        return replace(scheme, modules=replace(scheme.modules, prefixes=prefixes))
    return scheme


StoredScheme = Scheme | PackedScheme | GGUFScheme | Float8Scheme | MXFP4Scheme
"""A checkpoint's storage format."""
