"""Quantized rows of a weight, in the formats of `penstock.config.weight_formats`, and their dequantization in numpy."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.config.weight_formats import StoredType, WeightFormat
from penstock.dataclass import dataclass

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized rows of a weight. Scales, offsets and super scales have the dtypes that the format stores."""

    values: NDArray[np.uint8]
    """[rows, columns]: unsigned integers, or the bits of FP8 values"""
    scales: NDArray[Any]
    """[rows, groups]"""
    offsets: NDArray[Any] | None = None
    """[rows, groups]: zero points, fractions or minima; None if the format's zero is its centre"""
    super_scales: NDArray[Any] | None = None
    """[rows, supers]"""
    super_offsets: NDArray[Any] | None = None
    """[rows, supers]: super scales of the minima"""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> "Quantized":
        parts = (self.offsets, self.super_scales, self.super_offsets)
        return Quantized(
            self.values[rows], self.scales[rows], *(None if part is None else part[rows] for part in parts)
        )

    def check(self, format: WeightFormat) -> None:
        """Assert that every part has the shape and dtype of the format."""
        rows, columns = self.values.shape
        groups, supers = format.num_groups(columns), format.num_supers(columns)
        minimum = format.super_type if format.offset == "minimum" else None
        _check(self.values, (rows, columns), "uint8")
        _check(self.scales, (rows, groups), format.scale)
        _check(self.offsets, (rows, groups), format.offset_type)
        _check(self.super_scales, (rows, supers), format.super_type)
        _check(self.super_offsets, (rows, supers), minimum)
        assert format.offset != "fraction" or self.offsets is None or bool((self.offsets < 128).all())


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Quantized rows of several pieces, one after another."""
    if len(parts) == 1:
        return parts[0]

    def whole(name: str) -> NDArray[Any] | None:
        return None if getattr(parts[0], name) is None else np.concatenate([getattr(part, name) for part in parts])

    values, scales = (
        np.concatenate(part)
        for part in zip(*((quantized.values, quantized.scales) for quantized in parts), strict=True)
    )
    return Quantized(values, scales, whole("offsets"), whole("super_scales"), whole("super_offsets"))


def _check(part: NDArray[Any] | None, shape: tuple[int, int], type: StoredType | None) -> None:
    assert (part is None) == (type is None)
    if part is not None:
        assert (part.shape, part.dtype.name) == (shape, type), (part.shape, part.dtype, shape, type)


def dequantize(quantized: Quantized, format: WeightFormat) -> Floats:
    """Dequantize to [rows, columns], with one rounding: all products before the last operation are exact."""
    scales, offsets, row_scales = float_parts(quantized, format)
    columns = quantized.values.shape[1]
    scales, offsets = by_column(scales, format.group, columns), by_column(offsets, format.group, columns)
    made: Floats
    if format.value == "e4m3":
        made = quantized.values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    elif format.offset == "minimum":
        made = (quantized.values.astype(np.float32) * scales - offsets) * row_scales
    else:
        made = (quantized.values.astype(np.float32) - offsets) * scales * row_scales
    return made


def float_parts(quantized: Quantized, format: WeightFormat) -> tuple[Floats, Floats, Floats]:
    """Scales and offsets (zero points in steps, or minima) [rows, groups] and row scales [rows, 1]."""
    scales, offsets = quantized.scales.astype(np.float32), quantized.offsets
    ones = np.ones((len(scales), 1), np.float32)
    if offsets is None:
        zeros = np.full_like(scales, format.centre)
    else:
        zeros = offsets.astype(np.float32) / np.float32(format.values_per_zero)
    if quantized.super_scales is None:
        return scales, zeros, ones
    if format.has_row_scales:
        return scales, zeros, quantized.super_scales
    width = format.super_columns // format.group
    scales = scales * by_column(quantized.super_scales.astype(np.float32), width, scales.shape[1])
    if quantized.super_offsets is not None:
        zeros = zeros * by_column(quantized.super_offsets.astype(np.float32), width, scales.shape[1])
    return scales, zeros, ones


def by_column(parts: Floats, width: int, columns: int) -> Floats:
    """Repeat each of `parts` [rows, n] for its `width` columns -> [rows, columns]."""
    repeated: Floats = np.repeat(parts, width, 1)[:, :columns]
    return repeated
