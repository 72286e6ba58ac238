"""Recipes: which format each matrix is rounded to, by its name. Plain data, no torch.

`RECIPES` are those of `--quantization`, while weights are loaded; `CHECKPOINT_RECIPES` those of `penstock quantize`.
"""

import re
from dataclasses import dataclass

from penstock.weight_formats import FORMATS, WeightFormat

EMBEDDINGS = r"(.*\.)?(lm_head|embed_tokens|embeddings)"
"""Names of the output projection and of the token embedding."""

ROUTERS = r".*\.(gate|router|router\.layer|router\.proj|shared_expert_gate)"
"""Names of the maps that choose and weigh experts: they are small, and what they choose must not change."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Patterns of whole names with a format each; the first that matches decides."""

    choices: tuple[tuple[str, str], ...]

    def format_of(self, name: str) -> WeightFormat:
        """The format of the matrix that a checkpoint calls `name`, without `.weight`."""
        return next(FORMATS[format] for pattern, format in self.choices if re.fullmatch(pattern, name))


RECIPES: dict[str, Recipe] = {
    "int8": Recipe(
        ((EMBEDDINGS, "float"), (ROUTERS, "float"), (".*", "int8"))
    ),  # a third of what 8 bits cost is the head's
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
"""By the option's value."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """How compressed-tensors' `pack-quantized` layout stores what the kernels keep in a format, exactly."""

    bits: int
    """Of a value as it is stored."""
    used_bits: int
    """Of a value: the integers of 6 bits are stored in bytes, as other engines know 4 and 8 bits only."""
    group: int
    """Columns that share a scale, and a zero unless it is `symmetric`."""
    symmetric: bool

    @property
    def shift(self) -> int:
        """From integers of the bits that are used to those that are stored: the middle stays the middle."""
        return (1 << (self.bits - 1)) - (1 << (self.used_bits - 1))


PACKED: dict[str, PackedMatrix] = {
    "int4": PackedMatrix(4, 4, 32, symmetric=False),
    "int6": PackedMatrix(8, 6, 32, symmetric=True),
}
"""By the format's name."""


@dataclass(frozen=True, slots=True)
class CheckpointRecipe:
    """What `penstock quantize` makes of a model."""

    layers: Recipe
    """Of the layers' matrices: formats that `PACKED` has."""
    embeddings: str
    """Format that output projection and token embedding, stored as they were, are rounded to when they are loaded."""


CHECKPOINT_RECIPES: dict[str, CheckpointRecipe] = {
    "int4": CheckpointRecipe(Recipe(((r".*\.(q|k|v|qkv)_proj", "int6"), (".*", "int4"))), "int5"),
    "int6": CheckpointRecipe(Recipe(((".*", "int6"),)), "int5"),
}
"""By the option's value. Maps that other engines join, as q, k and v, are in one format."""
