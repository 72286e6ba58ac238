"""Rows of a weight as integers, as `penstock.weight_formats` describes them, and what they stand for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.weight_formats import WeightFormat


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows of a weight in one of the integer formats. Scales, offsets and super scales are of the types it stores."""

    values: Tensor
    """[rows, columns] uint8, from 0 on in every format"""
    scales: Tensor
    """[rows, groups]"""
    offsets: Tensor | None = None
    """[rows, groups]: zeros, eighths or minima; None where the format's zero is the centre"""
    super_scales: Tensor | None = None
    """[rows, supers]"""
    super_offsets: Tensor | None = None
    """[rows, supers], of the minima"""

    def __getitem__(self, rows: slice) -> "Quantized":
        parts = (self.offsets, self.super_scales, self.super_offsets)
        return Quantized(
            self.values[rows], self.scales[rows], *(None if part is None else part[rows] for part in parts)
        )


def dequantize(quantized: Quantized, format: WeightFormat) -> Tensor:
    """[rows, columns] float32, by the formula of the formats; all operations in float32."""
    columns = quantized.values.shape[1]
    values, scales = quantized.values.float(), by_column(group_scales(quantized, format), format.group, columns)
    if format.offset == "minimum":
        return values * scales - by_column(group_minima(quantized, format), format.group, columns)
    return (values - by_column(group_zeros(quantized, format), format.group, columns)) * scales


def group_scales(quantized: Quantized, format: WeightFormat) -> Tensor:
    """[rows, groups] float32: scales times super scales."""
    return _under(quantized.scales, quantized.super_scales, format)


def group_minima(quantized: Quantized, format: WeightFormat) -> Tensor:
    """[rows, groups] float32, of formats that have minima."""
    assert quantized.offsets is not None
    return _under(quantized.offsets, quantized.super_offsets, format)


def group_zeros(quantized: Quantized, format: WeightFormat) -> Tensor:
    """[rows, groups] float32 in steps of the values, of formats that have zeros."""
    if quantized.offsets is None:
        return torch.full(quantized.scales.shape, float(format.centre), device=quantized.scales.device)
    return quantized.offsets.float() / format.values_per_zero


def _under(parts: Tensor, supers: Tensor | None, format: WeightFormat) -> Tensor:
    if supers is None:
        return parts.float()
    return by_column(supers.float(), format.super_columns // format.group, parts.shape[1]) * parts.float()


def by_column(parts: Tensor, width: int, columns: int) -> Tensor:
    """`parts` [rows, n], each for `width` columns (0: all of them) -> [rows, columns]."""
    return parts.repeat_interleave(width or columns, 1)[:, :columns]
