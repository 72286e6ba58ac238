"""How the matrices of linear maps are kept: a table with a row a format. No torch.

    w = scale * (value - zero)          or          w = scale * value - minimum

`value` is an unsigned integer of few bits, or (FP8) a float of 8 bits without a zero. Scales, zeros and minima belong
to a group of columns of a row; under a super scale they are integers themselves, which it multiplies. A new format is a
row of the table.
"""

from dataclasses import dataclass
from typing import Literal

StoredType = Literal["float32", "bfloat16", "float16", "int8", "uint8"]
Value = Literal["integer", "e4m3"]
"""Encoding of a value: an unsigned integer, or FP8 with 4 bits of exponent and 3 of mantissa."""
Offset = Literal["centre", "zero", "fraction", "minimum"]
"""The offset that is subtracted from a value: the middle of its range; a zero a group, in whole steps or in fractions
of one (128 to the range); or, from its product with the scale, a minimum a group."""

STORED_BYTES: dict[StoredType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
PANEL = 64
"""Rows that the native kernels pack together."""
BLOCK = 64
"""Columns that they pack together."""
ACTIVATION_GROUP = 32
"""Columns of the activations that one scale rounds to int8, whatever the weight's integers are."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format."""

    name: str
    bits: int
    """Of a value."""
    group: int
    """Columns that share a scale, and a zero or minimum: 16, 32, 64 or a multiple of that."""
    scale: StoredType
    offset: Offset = "centre"
    offset_type: StoredType | None = None
    """None: there is nothing to store, as it is the centre."""
    super_type: StoredType | None = None
    """Of the super scale, and of that of the minima; None: there is none."""
    super_columns: int = 0
    """Columns that share one; 0: all of a row."""
    value: Value = "integer"

    @property
    def centre(self) -> int:
        """The zero of formats that store none."""
        return 1 << (self.bits - 1) if self.value == "integer" else 0

    @property
    def values_per_zero(self) -> int:
        """How many units of a stored zero are a step of the values."""
        return 128 >> self.bits if self.offset == "fraction" else 1

    @property
    def has_row_scales(self) -> bool:
        """Whether the super scales are those of whole rows."""
        return self.super_type is not None and self.super_columns == 0

    def num_groups(self, columns: int) -> int:
        """Scales of a row."""
        return -(-columns // self.group)

    def num_supers(self, columns: int) -> int:
        """Super scales of a row, where there are any."""
        return -(-columns // self.super_columns) if self.super_columns else 1

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix as the native kernels keep it; `csrc/linear_integer_layout.h` draws it."""
        blocks = -(-columns // BLOCK)
        scales = blocks * BLOCK // self.group if self.group <= BLOCK else self.num_groups(columns)
        row = blocks * BLOCK * self.bits // 8
        row += scales * (STORED_BYTES[self.scale] + (STORED_BYTES[self.offset_type] if self.offset_type else 0))
        if self.super_type is not None:
            row += self.num_supers(columns) * STORED_BYTES[self.super_type] * (2 if self.offset == "minimum" else 1)
        return -(-rows // PANEL) * PANEL * row


FLOAT = WeightFormat("float", 16, 1, "float32")
"""Floating point of the model's own type: only its name says anything."""

FORMATS: dict[str, WeightFormat] = {
    format.name: format
    for format in (
        FLOAT,
        # what recipes of our own round to: scales of 8 bits under a float32 a row
        WeightFormat("int8", 8, 32, "uint8", super_type="float32"),
        WeightFormat("int6", 6, 32, "uint8", super_type="float32"),
        WeightFormat("int5", 5, 32, "uint8", "fraction", "uint8", "float32"),
        WeightFormat("int4", 4, 32, "uint8", "fraction", "uint8", "float32"),
        # GPTQ, AWQ and compressed-tensors
        WeightFormat("int4_zero", 4, 32, "float16", "zero", "uint8"),
        WeightFormat("int4_zero_128", 4, 128, "float16", "zero", "uint8"),
        # FP8, with a scale a tensor, a row or a block of 128 x 128
        WeightFormat("fp8", 8, 128, "float32", value="e4m3"),
        # GGUF
        WeightFormat("q8_0", 8, 32, "float16"),
        WeightFormat("q5_0", 5, 32, "float16"),
        WeightFormat("q4_0", 4, 32, "float16"),
        WeightFormat("q5_1", 5, 32, "float16", "minimum", "float16"),
        WeightFormat("q4_1", 4, 32, "float16", "minimum", "float16"),
        WeightFormat("q5_k", 5, 32, "uint8", "minimum", "uint8", "float16", 256),
        WeightFormat("q4_k", 4, 32, "uint8", "minimum", "uint8", "float16", 256),
        WeightFormat("q6_k", 6, 16, "int8", super_type="float16", super_columns=256),
        # wider homes of other types of GGUF: of Q2_K and Q3_K, of IQ4_XS, and of MXFP4, which safetensors hold, too
        WeightFormat("int4_16", 4, 16, "int8", "minimum", "int8", "float16", 256),
        WeightFormat("int8_k", 8, 32, "int8", super_type="float16", super_columns=256),
        WeightFormat("mxfp4", 5, 32, "bfloat16"),
    )
}
"""By name."""
