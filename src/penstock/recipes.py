"""Recipes of `--quantization`: which format each matrix is rounded to, by its name. Plain data, no torch."""

import re
from dataclasses import dataclass

from penstock.weight_formats import FORMATS, WeightFormat

EMBEDDINGS = r"(.*\.)?(lm_head|embed_tokens)"
"""Names of the output projection and of the token embedding."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Patterns of whole names with a format each; the first that matches decides."""

    choices: tuple[tuple[str, str], ...]

    def format_of(self, name: str) -> WeightFormat:
        """The format of the matrix that a checkpoint calls `name`, without `.weight`."""
        return next(FORMATS[format] for pattern, format in self.choices if re.fullmatch(pattern, name))


RECIPES: dict[str, Recipe] = {
    "int8": Recipe(((".*", "int8"),)),
    "int4": Recipe(((EMBEDDINGS, "int6"), (".*", "int4"))),
}
"""By the option's value."""
