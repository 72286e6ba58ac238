"""Quantization recipes: the format of each matrix, by its name. Plain data, no torch.

`RECIPES` are used by `--quantization` on loading, `CHECKPOINT_RECIPES` by `penstock quantize`.
"""

import re

from penstock.config.weight_formats import FORMATS, WeightFormat
from penstock.dataclass import dataclass

EMBEDDINGS = r"(.*\.)?(lm_head|embed_tokens|embeddings)"
"""Names of the output projection and of the token embedding."""

ROUTERS = r".*\.(gate|router|router\.layer|router\.proj|shared_expert_gate)"
"""Names of the routers of experts, which are not quantized: they are small, and their choices should not change."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Patterns of full names with their formats; the first pattern that matches decides."""

    choices: tuple[tuple[str, str], ...]

    def format_of(self, name: str) -> WeightFormat:
        """The format of the matrix `name` (the checkpoint's name without `.weight`)."""
        return next(FORMATS[format] for pattern, format in self.choices if re.fullmatch(pattern, name))


RECIPES: dict[str, Recipe] = {
    "int8": Recipe(
        ((EMBEDDINGS, "float"), (ROUTERS, "float"), (".*", "int8"))
    ),  # quantizing lm_head would cause a third of the quality loss
    "int4": Recipe(
        (
            (EMBEDDINGS, "int5"),
            (r"(.*\.)?embed_tokens_per_layer", "int5"),
            (ROUTERS, "float"),
            (r".*\.(down_proj|output_linear|w2)", "int5"),
            (r".*\.([kv]|kv_b)_proj", "int6"),
            (".*", "int4"),
        ),
    ),
}
"""Recipes by the value of `--quantization`."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """How the `pack-quantized` layout of compressed-tensors stores a kernel format without loss."""

    bits: int
    """Bits per stored value."""
    used_bits: int
    """Bits that values use: 6-bit integers are stored in 8 bits, because other engines support only 4 and 8."""
    group: int
    """Columns that share a scale, and a zero point unless `symmetric`."""
    symmetric: bool

    @property
    def shift(self) -> int:
        """Added to values to convert them from `used_bits` to `bits`: the centre stays the centre."""
        return (1 << (self.bits - 1)) - (1 << (self.used_bits - 1))


PACKED: dict[str, PackedMatrix] = {
    "int4": PackedMatrix(4, 4, 32, symmetric=False),
    "int6": PackedMatrix(8, 6, 32, symmetric=True),
}
"""Layouts by format name."""


@dataclass(frozen=True, slots=True)
class CheckpointRecipe:
    """A recipe of `penstock quantize`."""

    layers: Recipe
    """Formats of the layers' matrices, from `PACKED`."""
    embeddings: str
    """Format that output projection and token embedding, stored unchanged, are quantized to on loading."""


CHECKPOINT_RECIPES: dict[str, CheckpointRecipe] = {
    "int4": CheckpointRecipe(Recipe(((r".*\.(q|k|v|qkv)_proj", "int6"), (".*", "int4"))), "int5"),
    "int6": CheckpointRecipe(Recipe(((".*", "int6"),)), "int5"),
    "w4a16": CheckpointRecipe(Recipe(((".*", "int4"),)), "int5"),  # vLLM on CPUs has no kernels for 8 bits
}
"""Recipes by the option's value. Layers that other engines fuse, such as q, k and v, have the same format."""
