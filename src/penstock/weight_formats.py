"""How the matrices of linear maps are kept: a table with a row a format. No torch.

    w = scale * (value - zero)          or          w = scale * value - minimum

`value` is an unsigned integer of few bits. Scales, zeros and minima belong to a group of columns of a row; under a
super scale they are integers themselves, which it multiplies. A new format is a row here and a kernel kind in
`csrc/ops.h`.
"""

from dataclasses import dataclass
from typing import Literal

StoredType = Literal["float32", "float16", "bfloat16", "int8", "uint8"]
Offset = Literal["centre", "zero", "eighths", "minimum"]
"""What is taken from a value: half of its range; a whole number a group; a number of eighths of a step; or from its
product with the scale a minimum."""

_BYTES: dict[StoredType, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
PANEL = 64
"""Rows that the native kernels pack together."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format; `group` and `super_columns` of 0 mean all columns of a row."""

    name: str
    kernel: int
    """`WeightKind` of `csrc/ops.h`."""
    bits: int
    """Of a value."""
    group: int
    """Columns that share a scale, and a zero or minimum."""
    scale: StoredType
    offset: Offset
    offset_type: StoredType | None = None
    """None: there is nothing to store, as it is the centre."""
    super_type: StoredType | None = None
    """Of the super scale, and of that of the minima; None: there is none."""
    super_columns: int = 0
    """Columns that share one."""
    block: int = 64
    """Columns that the native kernels pack together."""
    activation_group: int = 32
    """Columns of the activations that are rounded to int8 by one scale."""

    @property
    def centre(self) -> int:
        """The zero of formats that store none."""
        return 1 << (self.bits - 1)

    @property
    def values_per_zero(self) -> int:
        """Units of a stored zero in a step of the values."""
        return 8 if self.offset == "eighths" else 1

    def num_groups(self, columns: int) -> int:
        """Scales of a row."""
        return -(-columns // self.group) if self.group else 1

    def num_supers(self, columns: int) -> int:
        """Super scales of a row, where there are any."""
        return -(-columns // self.super_columns) if self.super_columns else 1

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix as the native kernels keep it."""
        offset_bytes = 0 if self.offset_type is None else _BYTES[self.offset_type]
        each = _BYTES[self.scale] + offset_bytes
        blocks = -(-columns // self.block)
        row = blocks * self.block * self.bits // 8
        row += blocks * (self.block // self.group or 1) * each if self.group and self.group <= self.block else 0
        row += self.num_groups(columns) * each if self.group == 0 or self.group > self.block else 0
        if self.super_type is not None:
            row += self.num_supers(columns) * _BYTES[self.super_type] * (2 if self.offset == "minimum" else 1)
        return -(-rows // PANEL) * PANEL * row


FLOAT = WeightFormat("float", 0, 16, 1, "float32", "centre")
"""Floating point of the model's own type; only the name says anything."""

FORMATS: dict[str, WeightFormat] = {
    format.name: format
    for format in (
        FLOAT,
        WeightFormat("int8", 2, 8, 0, "float32", "centre", activation_group=0),
        WeightFormat("int6_128", 6, 6, 128, "float16", "centre", block=128, activation_group=128),
        WeightFormat("int4_128", 3, 4, 128, "float16", "zero", "uint8", block=128, activation_group=128),
    )
}
"""By name."""
