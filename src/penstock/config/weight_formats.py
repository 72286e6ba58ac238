"""The kernels' weight formats: a table with one row per format. No torch.

    w = scale * (value - zero)          or          w = scale * value - minimum

`value` is an unsigned integer of few bits, or (FP8) an 8-bit float without a zero point. Scales, zero points and minima
apply to a group of columns of a row; with super scales they are integers themselves, which are multiplied by the super
scale. To add a format, add a row to the table.
"""

from typing import Literal

from penstock.dataclass import dataclass

StoredType = Literal["float32", "bfloat16", "float16", "int8", "uint8"]
Value = Literal["integer", "e4m3"]
"""Encoding of a value: an unsigned integer, or FP8 with 4 exponent and 3 mantissa bits."""
Offset = Literal["centre", "zero", "fraction", "minimum"]
"""The offset of values. centre: the middle of the range. zero, fraction: a zero point per group, in whole steps or in
fractions of a step (128 per range). minimum: subtracted per group from the product of value and scale."""

STORED_BYTES: dict[StoredType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
PANEL = 64
"""Rows that the native kernels pack together."""
BLOCK = 64
"""Columns that the native kernels pack together."""
ACTIVATION_GROUP = 32
"""Columns of activations that share an int8 scale, unless a format says otherwise."""
COARSE_GROUP = 128
"""The same for formats whose weights have larger rounding errors; also the group of int8 weights.

Where weights or activations have groups of this size, the kernels need one multiplication less per 32 columns."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A weight format."""

    name: str
    bits: int
    """Bits per value."""
    group: int
    """Columns that share a scale and a zero point or minimum: 16, 32, 64 or a multiple of 64."""
    scale: StoredType
    offset: Offset = "centre"
    offset_type: StoredType | None = None
    """None: no stored offset (centre)."""
    super_type: StoredType | None = None
    """Type of the super scales, of scales and of minima; None: no super scales."""
    super_columns: int = 0
    """Columns that share a super scale; 0: whole rows."""
    value: Value = "integer"
    x_group: int = ACTIVATION_GROUP
    """Columns of activations that share an int8 scale."""

    @property
    def centre(self) -> int:
        """The zero point of formats that do not store one."""
        return 1 << (self.bits - 1) if self.value == "integer" else 0

    @property
    def values_per_zero(self) -> int:
        """Units of a stored zero point per step of the values."""
        return 128 >> self.bits if self.offset == "fraction" else 1

    @property
    def has_row_scales(self) -> bool:
        """Whether super scales apply to whole rows."""
        return self.super_type is not None and self.super_columns == 0

    def num_groups(self, columns: int) -> int:
        """Number of scales per row."""
        return -(-columns // self.group)

    def num_supers(self, columns: int) -> int:
        """Number of super scales per row, for formats that have them."""
        return -(-columns // self.super_columns) if self.super_columns else 1

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Size of a matrix packed by the native kernels (see `csrc/linear_integer_layout.h`)."""
        blocks = -(-columns // BLOCK)
        scales = blocks * BLOCK // self.group if self.group <= BLOCK else self.num_groups(columns)
        row = blocks * BLOCK * self.bits // 8
        row += scales * (STORED_BYTES[self.scale] + (STORED_BYTES[self.offset_type] if self.offset_type else 0))
        if self.super_type is not None:
            row += self.num_supers(columns) * STORED_BYTES[self.super_type] * (2 if self.offset == "minimum" else 1)
        return -(-rows // PANEL) * PANEL * row


FLOAT = WeightFormat("float", 16, 1, "float32")
"""Floating point in the model's dtype; the other fields have no meaning."""

FORMATS: dict[str, WeightFormat] = {
    format.name: format
    for format in (
        FLOAT,
        # Penstock's own recipes: 8-bit scales with one float32 super scale per row
        WeightFormat("int8", 8, COARSE_GROUP, "uint8", super_type="float32"),
        WeightFormat("int6", 6, 32, "uint8", super_type="float32"),
        WeightFormat("int5", 5, 32, "uint8", "fraction", "uint8", "float32", x_group=COARSE_GROUP),
        WeightFormat("int4", 4, 32, "uint8", "fraction", "uint8", "float32", x_group=COARSE_GROUP),
        # GPTQ, AWQ and compressed-tensors
        WeightFormat("int4_zero", 4, 32, "float16", "zero", "uint8"),
        WeightFormat("int4_zero_128", 4, 128, "float16", "zero", "uint8"),
        # FP8, with one scale per tensor, row or block of 128 x 128
        WeightFormat("fp8", 8, 128, "float32", value="e4m3"),
        # GGUF
        WeightFormat("q8_0", 8, 32, "float16"),
        WeightFormat("q5_0", 5, 32, "float16"),
        WeightFormat("q4_0", 4, 32, "float16"),
        WeightFormat("q5_1", 5, 32, "float16", "minimum", "float16"),
        WeightFormat("q4_1", 4, 32, "float16", "minimum", "float16"),
        WeightFormat("q5_k", 5, 32, "uint8", "minimum", "uint8", "float16", 256, x_group=COARSE_GROUP),
        WeightFormat("q4_k", 4, 32, "uint8", "minimum", "uint8", "float16", 256, x_group=COARSE_GROUP),
        WeightFormat("q6_k", 6, 16, "int8", super_type="float16", super_columns=256, x_group=COARSE_GROUP),
        # wider formats for other GGUF types: Q2_K and Q3_K; IQ4_XS; MXFP4, which safetensors files contain, too
        WeightFormat("int4_16", 4, 16, "int8", "minimum", "int8", "float16", 256),
        WeightFormat("int8_k", 8, 32, "int8", super_type="float16", super_columns=256),
        WeightFormat("mxfp4", 5, 32, "bfloat16"),
        # the same with super scales that float16 does not represent: IQ1_S and IQ3_S; IQ1_M and IQ3_XXS; IQ2_XXS
        WeightFormat("int4_wide", 4, 32, "uint8", "minimum", "uint8", "float32", 256, x_group=COARSE_GROUP),
        WeightFormat("int6_wide", 6, 16, "int8", super_type="float32", super_columns=256, x_group=COARSE_GROUP),
        WeightFormat("int8_wide", 8, 32, "int8", super_type="float32", super_columns=256, x_group=COARSE_GROUP),
        # IQ2_XS and IQ2_S; NVFP4, whose rows have the scale of their tensor, too
        WeightFormat("int8_wide_16", 8, 16, "int8", super_type="float32", super_columns=256, x_group=COARSE_GROUP),
        WeightFormat("nvfp4", 6, 16, "float16", super_type="float32"),
    )
}
"""All formats by name."""
