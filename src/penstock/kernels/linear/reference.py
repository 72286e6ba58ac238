"""Linear layers in plain torch, for every weight format."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from penstock.config.feed_forward import Activation
from penstock.config.weight_formats import ACTIVATION_GROUP, FLOAT, WeightFormat
from penstock.kernels.arrays import tensor_of
from penstock.kernels.elementwise.reference import activate_gated, apply_activation
from penstock.kernels.linear.quantized import Quantized, dequantize, float_parts
from penstock.kernels.linear.weight import activation_of
from penstock.kernels.lora import LoraUpdate

TILE_ROWS = 256
"""Rows that are dequantized at a time: bounds the temporary memory of a product."""


class ReferenceWeight:
    """A weight as plain tensors, which defines the results of all versions. See `Weight` for the methods.

    `widened`: quantized values, and floating point of another type than the model's, are kept in float32. That takes
    more memory, and saves converting the whole weight at each product, which is most of the work.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        format: WeightFormat,
        *,
        gated: bool,
        activation: Activation | None = None,
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
        device: str,
        precise: bool = False,
        widened: bool = False,
    ) -> None:
        self.rows, self.columns, self.format, self.gated = rows, columns, format, gated
        self._precise = precise
        self.activation = activation_of(activation, gated=gated)
        self.bias_dtype = dtype
        self._dtype = dtype
        self._stored = stored or dtype if format is FLOAT else torch.uint8
        self._widened = widened and self._stored != dtype
        groups = 0 if format is FLOAT or self._widened else format.num_groups(columns)
        kept = torch.float32 if self._widened else self._stored
        self._values = torch.empty(rows, columns, dtype=kept, device=device)
        self._scales = torch.empty(rows, groups, device=device)
        self._offsets = torch.empty(rows, groups, device=device)
        self._row_scales = torch.empty(rows, 1 if groups else 0, device=device)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes + self._offsets.nbytes + self._row_scales.nbytes

    def load(self, first: int, rows: NDArray[Any] | Quantized) -> None:
        if not isinstance(rows, Quantized):
            assert self.format is FLOAT
            self._values[first : first + len(rows)].copy_(tensor_of(rows).to(self._stored))
            return
        rows.check(self.format)
        if self._widened:
            for start in range(0, len(rows.values), TILE_ROWS):
                tile = rows[start : start + TILE_ROWS]
                made = tensor_of(dequantize(tile, self.format))
                self._values[first + start : first + start + len(made)].copy_(made)
            return
        filled = slice(first, first + len(rows.values))
        parts: tuple[NDArray[Any], ...] = (rows.values, *float_parts(rows, self.format))
        for kept, part in zip((self._values, self._scales, self._offsets, self._row_scales), parts, strict=True):
            kept[filled].copy_(tensor_of(part))

    def lookup(self, row_ids: Tensor) -> Tensor:
        if self.format is FLOAT:
            return self._values.index_select(0, row_ids).to(self._dtype)
        return self._dequantized(row_ids).to(self._dtype)

    def linear(
        self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, update: LoraUpdate[Tensor] | None = None
    ) -> Tensor:
        out = self._products(x, bias)
        if update is not None:
            columns = slice(update.first, update.first + self.rows)
            if update.factors is not None:
                factors = update.factors[:, columns]
                scaled = self._products(x, None).float() * factors + (0.0 if bias is None else bias.float())
                out = torch.where((factors != 1).any(-1, keepdim=True), scaled, out.float())
            out = (out.float() + update.added[:, columns]).to(x.dtype)
        if self.activation is not None:
            out = (activate_gated if self.gated else apply_activation)(out, self.activation)
        return out.to(dtype)

    def _products(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.format is FLOAT:
            return F.linear(x, self._values.to(x.dtype), bias)
        rounded = x.float()
        if self.format.value == "integer":
            rounded = as_two_int8(rounded) if self._precise else as_int8(rounded, self.format.x_group)
        if self._widened:
            out = F.linear(rounded, self._values)
        else:
            out = torch.empty(len(x), self.rows, device=x.device)
            for first in range(0, self.rows, TILE_ROWS):
                tile = slice(first, first + TILE_ROWS)
                out[:, tile] = F.linear(rounded, self._dequantized(tile))
        return (out if bias is None else out + bias).to(x.dtype)

    def linear_into(
        self,
        out: Tensor,
        first: int,
        x: Tensor,
        bias: Tensor | None,
        *,
        column: int = 0,
        after_gate: Activation | None = None,
        update: LoraUpdate[Tensor] | None = None,
    ) -> None:
        made = self.linear(x[:, column : column + self.columns], bias, x.dtype, update)
        place = out[:, first : first + made.shape[1]]
        if after_gate is not None:
            made = activate_gated(torch.cat((place.to(x.dtype), made), -1), after_gate)
        place.copy_(made)

    def _dequantized(self, rows: Tensor | slice) -> Tensor:
        """[rows, columns] float32."""
        if self._widened:
            return self._values[rows]
        parts = (self._values, self._scales, self._offsets, self._row_scales)
        return _weights_of(self.format, *(part[rows] for part in parts))


def _weights_of(format: WeightFormat, values: Tensor, scales: Tensor, offsets: Tensor, row_scales: Tensor) -> Tensor:
    """`dequantize` in torch, with the parts from `float_parts`."""
    scales, offsets = (part.repeat_interleave(format.group, 1)[:, : values.shape[1]] for part in (scales, offsets))
    if format.value == "e4m3":
        return values.view(torch.float8_e4m3fn).float() * scales
    if format.offset == "minimum":
        return (values.float() * scales - offsets) * row_scales
    return (values.float() - offsets) * scales * row_scales


def as_two_int8(x: Tensor) -> Tensor:
    """Round `x` with `as_int8`, and add the remainder rounded to steps 1/254 as large (15 bits in total)."""
    rounded = as_int8(x, ACTIVATION_GROUP)
    return rounded + _rounded(x - rounded, _steps(x, ACTIVATION_GROUP) / 254, ACTIVATION_GROUP)


def as_int8(x: Tensor, group: int) -> Tensor:
    """Round each group of columns of `x` [num_tokens, columns] to the 255 steps of symmetric int8."""
    return _rounded(x, _steps(x, group), group)


def _steps(x: Tensor, group: int) -> Tensor:
    """The int8 step of each group of columns: [num_tokens, groups, 1]."""
    return _grouped(x, group).abs().amax(-1, keepdim=True) / 127


def _rounded(x: Tensor, steps: Tensor, group: int) -> Tensor:
    rounded = (_grouped(x, group) / steps.clamp(min=1e-30)).round_().mul_(steps)
    return rounded.view(len(x), -1)[:, : x.shape[1]]


def _grouped(x: Tensor, group: int) -> Tensor:
    """[num_tokens, groups, group], padded with zeros after the last column."""
    missing = -x.shape[1] % group
    return (F.pad(x, (0, missing)) if missing else x).reshape(len(x), -1, group)
