"""Linear layers by the native kernels, with weights packed in the layouts of `csrc/linear_kind.h`."""

import ctypes
import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.config.feed_forward import Activation
from penstock.config.weight_formats import ACTIVATION_GROUP, FLOAT, PANEL, Offset, StoredType, WeightFormat
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.linear.weight import Packed, activation_of
from penstock.kernels.lora import LoraUpdate
from penstock.native import Library
from penstock.native.array import AnyDtype, Array, dtype_name, dtype_of
from penstock.native.program import call, empty_rows
from penstock.native.structs import LinearArgs, UnpackArgs
from penstock.native.structs import Weight as WeightStruct
from penstock.system.allocator import Allocator

log = logging.getLogger(__name__)

_FLOAT32, _BFP16, _INTEGERS, _FLOAT16, _BFLOAT16, _BFLOAT12, _FLOAT8, _FLOAT8_BY_16 = range(8)  # codes of ops.h
_STORED_TYPES: tuple[StoredType, ...] = ("float32", "bfloat16", "float16", "int8", "uint8")
_OFFSETS: tuple[Offset, ...] = ("centre", "zero", "fraction", "minimum")
_ACTIVATIONS: tuple[Activation | None, ...] = (None, "silu", "gelu_tanh", "clamped_swiglu", "relu2", "gelu")

_WIDER = {_BFLOAT12: (_BFLOAT16,)}
"""Fallback kinds for weights that a kind cannot represent."""
_ROWS_WIDENED = 4096
"""Rows converted at a time."""


class PackedWeight:
    """A weight in the native layout. See `Weight` for the methods."""

    def __init__(
        self,
        library: Library,
        allocator: Allocator,
        rows: int,
        columns: int,
        format: WeightFormat,
        *,
        gated: bool,
        activation: Activation | None,
        dtype: AnyDtype,
        stored: AnyDtype | None = None,
        precise: bool = False,
    ) -> None:
        self._library, self._allocator = library, allocator
        self.rows, self.columns, self.format, self.gated = rows, columns, format, gated
        self.activation = activation_of(activation, gated=gated)
        self.bias_dtype = dtype_of("float32")
        self._dtype = dtype
        self._weight = WeightStruct(_kind_of(format, dtype, stored or dtype, library), gated, rows, columns)
        if format is not FLOAT:
            _describe(format, self._weight)
        integers = format is not FLOAT and format.value == "integer"
        self._weight.x_bytes = 2 if precise and integers else 1
        self._weight.x_group = ACTIVATION_GROUP if precise else format.x_group
        self._handle = ctypes.addressof(self._weight)
        self._pack = library.function("penstock_pack", "pllpipppp", ctypes.c_int32)
        self._weight_bytes = library.function("penstock_weight_bytes", "p", ctypes.c_int64)
        # One panel more than the rows need: each half of a gated weight ends in its own panel.
        self._num_row_scales = -(-rows // PANEL) * PANEL + PANEL if format.has_row_scales else 0
        self._data: NDArray[np.uint8] | None = None
        self._row_scales: NDArray[np.float32] | None = None

    @property
    def handle(self) -> int:
        """Address of the library's struct of the weight."""
        self._memory()
        return self._handle

    @property
    def nbytes(self) -> int:
        packed: int = self._weight_bytes(self._handle)
        return packed + 4 * self._num_row_scales

    def packed(self) -> Packed:
        data, row_scales = self._memory()
        return Packed(str(self._weight.kind), (data, row_scales.view(np.uint8)))

    def adopt(self, packed: Packed) -> bool:
        kinds = {str(kind): kind for kind in {self._weight.kind, *_WIDER.get(self._weight.kind, ())}}
        if packed.form not in kinds or len(packed.parts) != 2:
            return False
        adopted = WeightStruct.from_buffer_copy(self._weight)
        adopted.kind = kinds[packed.form]
        sizes = (self._weight_bytes(ctypes.addressof(adopted)), 4 * self._num_row_scales)
        # A file of another build, whose layout has other sizes: the weight is packed anew.
        if tuple(part.nbytes for part in packed.parts) != sizes:
            return False
        self._weight.kind = adopted.kind
        self._hold(packed.parts[0], packed.parts[1].view(np.float32))
        return True

    def _memory(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """The packed weight and its row scales: allocated as zeros on first use, never if a packed form is adopted."""
        if self._data is None or self._row_scales is None:
            data = self._allocator.zeros(self._weight_bytes(self._handle), for_weights=True)
            self._hold(data, np.zeros(self._num_row_scales, np.float32))
        assert self._data is not None
        assert self._row_scales is not None
        return self._data, self._row_scales

    def _hold(self, data: NDArray[np.uint8], row_scales: NDArray[np.float32]) -> None:
        self._data, self._row_scales = data, row_scales
        self._weight.data = data.ctypes.data
        self._weight.row_scales = row_scales.ctypes.data if len(row_scales) else None

    def load(self, first: int, rows: NDArray[Any] | Quantized) -> None:
        if isinstance(rows, Quantized):
            assert self.format is not FLOAT
            rows.check(self.format)
            self._fill(first, rows.values, 0, rows.scales, rows.offsets, rows.super_scales, rows.super_offsets)
        else:
            assert self.format is FLOAT
            rows = rows if native.supports(rows.dtype) else rows.astype(np.float32)
            self._fill(first, rows, native.dtype_code(rows.dtype), None, None, None, None)

    def _fill(self, first: int, source: NDArray[Any], dtype: int, *parts: NDArray[Any] | None) -> None:
        count, columns = source.shape
        assert columns == self.columns
        assert 0 <= first <= first + count <= self.rows
        source = np.ascontiguousarray(source)
        kept = [None if part is None else np.ascontiguousarray(part) for part in parts]  # alive until they are packed
        self._memory()
        rows = (first, count, native.array_address(source), dtype, *(native.array_address(part) for part in kept))
        if self._pack(self._handle, *rows):
            self._widen()
            self._pack(self._handle, *rows)

    def _widen(self) -> None:
        """Convert to 16 bits per weight: the exponents vary too much for 12."""
        log.warning(
            "a bfloat16 matrix of %d x %d cannot be compressed to 12 bits per weight: using 16", self.rows, self.columns
        )
        assert self._row_scales is not None
        # The rows packed so far are packed again: one weight has one layout.
        wide = WeightStruct(_BFLOAT16, self.gated, self.rows, self.columns, x_bytes=1)
        handle = ctypes.addressof(wide)
        data = self._allocator.zeros(self._weight_bytes(handle), for_weights=True)
        wide.data = data.ctypes.data
        # In pieces: all rows at once would need the matrix in floating point beside both packed forms.
        for first in range(0, self.rows, _ROWS_WIDENED):
            rows = self.lookup(Array(np.arange(first, min(first + _ROWS_WIDENED, self.rows))))
            self._pack(handle, first, len(rows), rows.data_ptr(), native.dtype_code(rows.dtype), *(4 * [None]))
        self._weight.kind = wide.kind
        self._hold(data, self._row_scales)

    def lookup(self, row_ids: Array) -> Array:
        self._memory()
        assert dtype_name(row_ids.dtype) == "int64"
        assert row_ids.is_contiguous()
        out = empty_rows(row_ids, (self.columns,), self._dtype)
        arguments = UnpackArgs(
            weight=self._handle,
            row_ids=row_ids.data_ptr(),
            y=out.data_ptr(),
            y_dtype=native.dtype_code(self._dtype),
        )
        call(self._library, row_ids, arguments)
        return out

    def linear(self, x: Array, bias: Array | None, dtype: AnyDtype, update: LoraUpdate[Array] | None = None) -> Array:
        out = empty_rows(x, (self.rows // 2 if self.gated else self.rows,), dtype)
        self.linear_into(out, 0, x, bias, update=update)
        return out

    def linear_into(
        self,
        out: Array,
        first: int,
        x: Array,
        bias: Array | None,
        *,
        column: int = 0,
        after_gate: Activation | None = None,
        update: LoraUpdate[Array] | None = None,
    ) -> None:
        self._memory()
        arguments = LinearArgs(
            weight=self._handle,
            x=x.data_ptr() + column * x.dtype.itemsize,
            x_stride=x.stride(0),
            x_dtype=native.dtype_code(x.dtype),
            y_dtype=native.dtype_code(out.dtype),
            y=out.data_ptr() + first * out.dtype.itemsize,
            y_stride=out.stride(0),
            bias=native.address(bias),
            after_gate=after_gate is not None,
            activation=activation_code(after_gate or self.activation),
        )
        if update is not None:
            arguments.added = update.added.data_ptr() + update.first * update.added.dtype.itemsize
            arguments.added_stride = update.added.stride(0)
            arguments.adapters = update.rows.handle
            arguments.lora, arguments.lora_stride, arguments.lora_first = update.slots, 1, update.first
        call(self._library, x, arguments)


def activation_code(activation: Activation | None) -> int:
    """The library's code for an activation."""
    return _ACTIVATIONS.index(activation)


def _kind_of(format: WeightFormat, dtype: AnyDtype, stored: AnyDtype, library: Library) -> int:
    by_bfloat16 = dtype_name(dtype) == "bfloat16" and library.multiplies_bfloat16
    if format is FLOAT:
        bfloat16 = _BFLOAT12 if by_bfloat16 else _BFP16
        return {"float32": _FLOAT32, "bfloat16": bfloat16, "float16": _FLOAT16}[dtype_name(stored)]
    if format.value == "e4m3":
        return _FLOAT8_BY_16 if by_bfloat16 else _FLOAT8
    return _INTEGERS


def _describe(format: WeightFormat, weight: WeightStruct) -> None:
    """Copy the fields of an integer format to the library's struct."""
    weight.bits, weight.group, weight.super_columns = format.bits, format.group, format.super_columns
    weight.offset = _OFFSETS.index(format.offset)
    weight.scale_type = _STORED_TYPES.index(format.scale)
    weight.offset_type = _STORED_TYPES.index(format.offset_type) if format.offset_type else -1
    weight.super_type = _STORED_TYPES.index(format.super_type) if format.super_type else -1


class LinearKernels:
    """Allocates weights in the native layouts."""

    def __init__(self, library: Library, allocator: Allocator) -> None:
        self._library, self._allocator = library, allocator

    def new_weight(
        self,
        rows: int,
        columns: int,
        format: WeightFormat,
        *,
        gated: bool,
        activation: Activation | None = None,
        dtype: AnyDtype,
        stored: AnyDtype | None = None,
        device: str,
        precise: bool = False,
    ) -> PackedWeight:
        """See `NewWeight`."""
        assert str(device) == "cpu"
        return PackedWeight(
            self._library,
            self._allocator,
            rows,
            columns,
            format,
            gated=gated,
            activation=activation,
            dtype=dtype,
            stored=stored,
            precise=precise,
        )
