"""How a checkpoint stores the matrices of its layers, where it does not as floating point. Plain data, no torch."""

import re
from dataclasses import dataclass
from typing import Literal

from penstock.recipes import EMBEDDINGS
from penstock.weight_formats import FLOAT, FORMATS, WeightFormat

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
        return FORMATS["int8" if self.format == "int-quantized" else "int4_128"]
