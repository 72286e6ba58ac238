"""Weights to integers: round to nearest, at the scale that leaves the smallest squared error of those tried."""

from dataclasses import dataclass

from torch import Tensor

GROUP = 128
"""Columns that share a scale, and a zero, in less than 8 bits."""


@dataclass(frozen=True, slots=True)
class Int8:
    """w = q * scale."""

    q: Tensor
    """[out, in] int8, -127 to 127"""
    scale: Tensor
    """[out] float32"""

    def dequantize(self) -> Tensor:
        """[out, in] float32."""
        return self.q * self.scale.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Int6:
    """w = q * scale, in groups of `GROUP` columns; the last may be shorter."""

    q: Tensor
    """[out, in] int8, -31 to 31"""
    scale: Tensor
    """[out, groups] float32, of float16's precision"""

    def dequantize(self) -> Tensor:
        """[out, in] float32."""
        return self.q * self.scale.repeat_interleave(GROUP, 1)[:, : self.q.shape[1]]


@dataclass(frozen=True, slots=True)
class Int4:
    """w = (q - zero) * scale, in groups of `GROUP` columns; the last may be shorter."""

    q: Tensor
    """[out, in] uint8, 0 to 15"""
    scale: Tensor
    """[out, groups] float32, of float16's precision"""
    zero: Tensor
    """[out, groups] uint8, 0 to 15"""

    def dequantize(self) -> Tensor:
        """[out, in] float32."""
        scale, zero = (part.repeat_interleave(GROUP, 1)[:, : self.q.shape[1]] for part in (self.scale, self.zero))
        return (self.q.float() - zero) * scale
