"""Quantized rows of a weight, in the formats of `penstock.config.weight_formats`, and their dequantization."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config.weight_formats import StoredType, WeightFormat


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized rows of a weight. Scales, offsets and super scales have the dtypes that the format stores."""

    values: Tensor
    """[rows, columns] uint8: unsigned integers, or the bits of FP8 values"""
    scales: Tensor
    """[rows, groups]"""
    offsets: Tensor | None = None
    """[rows, groups]: zero points, fractions or minima; None if the format's zero is its centre"""
    super_scales: Tensor | None = None
    """[rows, supers]"""
    super_offsets: Tensor | None = None
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


def _check(part: Tensor | None, shape: tuple[int, int], type: StoredType | None) -> None:
    assert (part is None) == (type is None)
    if part is not None and type is not None:
        assert (part.shape, part.dtype) == (shape, getattr(torch, type)), (part.shape, part.dtype, shape, type)


def dequantize(quantized: Quantized, format: WeightFormat) -> Tensor:
    """Dequantize to [rows, columns] float32, with one rounding: all products before the last operation are exact."""
    scales, offsets, row_scales = float_parts(quantized, format)
    return weights_of(format, quantized.values, scales, offsets, row_scales)


def float_parts(quantized: Quantized, format: WeightFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and offsets (zero points in steps, or minima) [rows, groups] and row scales [rows, 1], in float32."""
    rows = len(quantized.values)
    scales, offsets = quantized.scales.float(), quantized.offsets
    zeros = torch.full_like(scales, format.centre) if offsets is None else offsets.float() / format.values_per_zero
    if quantized.super_scales is None:
        return scales, zeros, torch.ones(rows, 1, device=scales.device)
    if format.has_row_scales:
        return scales, zeros, quantized.super_scales
    scales = scales * by_column(quantized.super_scales.float(), format.super_columns // format.group, scales.shape[1])
    if quantized.super_offsets is not None:
        width = format.super_columns // format.group
        zeros = zeros * by_column(quantized.super_offsets.float(), width, scales.shape[1])
    return scales, zeros, torch.ones(rows, 1, device=scales.device)


def weights_of(format: WeightFormat, values: Tensor, scales: Tensor, offsets: Tensor, row_scales: Tensor) -> Tensor:
    """Dequantize `values` with the parts from `float_parts`."""
    columns = values.shape[1]
    scales, offsets = by_column(scales, format.group, columns), by_column(offsets, format.group, columns)
    if format.value == "e4m3":
        return values.view(torch.float8_e4m3fn).float() * scales
    if format.offset == "minimum":
        return (values.float() * scales - offsets) * row_scales
    return (values.float() - offsets) * scales * row_scales


def by_column(parts: Tensor, width: int, columns: int) -> Tensor:
    """Repeat each of `parts` [rows, n] for its `width` columns -> [rows, columns]."""
    return parts.repeat_interleave(width, 1)[:, :columns]
