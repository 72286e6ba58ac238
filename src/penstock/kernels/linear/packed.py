"""Weights packed for the native kernel, and the linear map with them."""

import ctypes
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from penstock import native

WeightKind = Literal["float32", "block16", "int8", "int4"]
_KINDS: dict[WeightKind, int] = {"float32": 0, "block16": 1, "int8": 2, "int4": 3}

PANEL = 32
"""Rows of a panel; pieces of this many rows at a time pack fastest."""


class _Weight(ctypes.Structure):
    """`Weight` of `csrc/ops.h`."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
    )


class PackedWeight:
    """A weight [rows, columns] in the layout of `csrc/linear.cpp`, filled row by row.

    kind      "float32"; "block16" for bfloat16 and float16 (integers that share an exponent); "int8"; "int4"
    gated     the rows are those of a gate, then as many of `up`; the map is then silu(gate(x)) * up(x)
    """

    def __init__(self, rows: int, columns: int, kind: WeightKind, *, gated: bool = False) -> None:
        library = native.library()
        assert library is not None
        self.rows, self.columns, self.kind, self.gated = rows, columns, kind, gated
        self._weight = _Weight(_KINDS[kind], gated, rows, columns, None, None)
        self._handle = ctypes.addressof(self._weight)
        self._pack = library.function("penstock_pack", "pllpipp")
        self._unpack = library.function("penstock_unpack", "pplpi")
        self._linear = library.function("penstock_linear", "ppliplilp", ctypes.c_int32)
        size = library.function("penstock_weight_bytes", "p", ctypes.c_int64)(self._handle)
        self._data = _huge_zeros(size)
        self._weight.data = self._data.data_ptr()
        self._row_scales = torch.zeros(-(-rows // PANEL) * PANEL + PANEL) if kind == "int8" else None
        self._weight.row_scales = native.address(self._row_scales)

    @property
    def nbytes(self) -> int:
        """Memory that the packed weight takes."""
        return self._data.nbytes + (0 if self._row_scales is None else self._row_scales.nbytes)

    @property
    def out_size(self) -> int:
        """Elements of an output row."""
        return self.rows // 2 if self.gated else self.rows

    def load(self, first: int, rows: Tensor) -> None:
        """Fill the rows from `first` on with `rows` [n, columns] of a floating type; "float32" and "block16" only."""
        assert self.kind in ("float32", "block16")
        rows = rows.contiguous() if native.supports(rows.dtype) else rows.float().contiguous()
        self._fill(first, rows, native.dtype_code(rows.dtype), None, None)

    def load_int8(self, first: int, values: Tensor, scales: Tensor) -> None:
        """Fill rows with `values` int8 [n, columns] times `scales` float32 [n]."""
        assert self.kind == "int8" and values.dtype == torch.int8
        self._fill(first, values.contiguous(), 0, scales.float().contiguous(), None)

    def load_int4(self, first: int, values: Tensor, scales: Tensor, zeros: Tensor) -> None:
        """Fill rows with (`values` - `zeros`) * `scales`.

        `values` uint8 [n, columns] from 0 to 15; `scales` [n, groups], kept as float16, and `zeros` uint8
        [n, groups], with a group of 128 columns.
        """
        assert self.kind == "int4" and values.dtype == zeros.dtype == torch.uint8
        self._fill(first, values.contiguous(), 0, scales.float().contiguous(), zeros.contiguous())

    def _fill(self, first: int, source: Tensor, dtype: int, scales: Tensor | None, zeros: Tensor | None) -> None:
        count, columns = source.shape
        assert columns == self.columns and 0 <= first <= first + count <= self.rows
        self._pack(self._handle, first, count, source.data_ptr(), dtype, native.address(scales), native.address(zeros))

    def rows_of(self, row_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows `row_ids` [n] int64 -> [n, columns]: an embedding's lookup."""
        out = torch.empty(len(row_ids), self.columns, dtype=dtype)
        self._unpack(self._handle, row_ids.data_ptr(), len(row_ids), out.data_ptr(), native.dtype_code(dtype))
        return out

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """`x` [num_tokens, columns], rows contiguous -> [num_tokens, out_size]; `bias` [rows] float32."""
        num_tokens = len(x)
        out = torch.empty(num_tokens, self.out_size, dtype=out_dtype)
        failed = self._linear(
            self._handle,
            x.data_ptr(),
            x.stride(0),
            native.dtype_code(x.dtype),
            out.data_ptr(),
            self.out_size,
            native.dtype_code(out_dtype),
            num_tokens,
            native.address(bias),
        )
        if failed:
            raise MemoryError(f"no memory for the activations of {num_tokens} tokens")
        return out


def _huge_zeros(size: int) -> Tensor:
    """Zeroed bytes that begin a cache line, in huge pages where there are some: numpy asks the system for those."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start : start + size])
