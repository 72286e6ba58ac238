"""The linear map in plain torch, for every kind of weight."""

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels.elementwise.reference import silu_mul
from penstock.kernels.linear.weight import GROUP
from penstock.memory import WeightKind

TILE_ROWS = 256
"""Rows that are dequantized at one time: what bounds the temporary memory of a product."""


class ReferenceWeight:
    """A weight as tensors, and the truth about what the map with it is. See `Weight` for the methods."""

    def __init__(
        self, rows: int, columns: int, kind: WeightKind, *, gated: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.columns, self.kind, self.gated = rows, columns, kind, gated
        self.bias_dtype = dtype
        self._dtype = dtype
        stored = {"float": dtype, "int8": torch.int8, "int6": torch.int8, "int4": torch.uint8}[kind]
        groups = {"float": 0, "int8": 1}.get(kind, -(-columns // GROUP))
        self._values = torch.empty(rows, columns, dtype=stored, device=device)
        self._scales = torch.empty(rows, groups, device=device)
        self._zeros = torch.zeros(rows, groups, device=device)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes + self._zeros.nbytes

    def load(self, first: int, rows: Tensor) -> None:
        assert self.kind == "float"
        self._values[first : first + len(rows)].copy_(rows)

    def load_int8(self, first: int, values: Tensor, scales: Tensor) -> None:
        assert self.kind == "int8"
        self._fill(first, values, scales.unsqueeze(1))

    def load_int6(self, first: int, values: Tensor, scales: Tensor) -> None:
        assert self.kind == "int6"
        self._fill(first, values, scales.to(torch.float16))

    def load_int4(self, first: int, values: Tensor, scales: Tensor, zeros: Tensor) -> None:
        assert self.kind == "int4"
        self._fill(first, values, scales.to(torch.float16))
        self._zeros[first : first + len(values)].copy_(zeros)

    def _fill(self, first: int, values: Tensor, scales: Tensor) -> None:
        self._values[first : first + len(values)].copy_(values)
        self._scales[first : first + len(values)].copy_(scales)

    def lookup(self, row_ids: Tensor) -> Tensor:
        if self.kind == "float":
            return self._values.index_select(0, row_ids)
        picked = (tensor.index_select(0, row_ids) for tensor in (self._values, self._scales, self._zeros))
        return _dequantized(*picked).to(self._dtype)

    def linear(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.kind == "float":
            out = F.linear(x, self._values, bias)
        else:
            rounded = _as_int8(x.float(), self.columns if self.kind == "int8" else GROUP)
            out = torch.empty(len(x), self.rows, device=x.device)
            for tile in (slice(first, first + TILE_ROWS) for first in range(0, self.rows, TILE_ROWS)):
                floats = _dequantized(self._values[tile], self._scales[tile], self._zeros[tile])
                out[:, tile] = F.linear(rounded, floats)
            out = (out if bias is None else out + bias).to(x.dtype)
        return (silu_mul(out) if self.gated else out).to(dtype)


def _dequantized(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """[rows, columns] float32."""
    width = GROUP if scales.shape[1] > 1 or values.shape[1] <= GROUP else values.shape[1]
    columns = values.shape[1]
    zeros, scales = (tensor.repeat_interleave(width, 1)[:, :columns] for tensor in (zeros, scales))
    return (values.float() - zeros) * scales


def _as_int8(x: Tensor, group: int) -> Tensor:
    """`x` [num_tokens, columns], each group of columns rounded to 255 steps between minus and plus its largest."""
    tokens, columns = x.shape
    padded = F.pad(x, (0, -columns % group)).view(tokens, -1, group)
    scale = padded.abs().amax(-1, keepdim=True) / 127
    rounded = (padded / scale.clamp(min=1e-30)).round() * scale
    return rounded.view(tokens, -1)[:, :columns]
