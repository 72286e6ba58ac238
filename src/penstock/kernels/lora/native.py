"""LoRA updates by the native library (`csrc/lora.cpp`)."""

import ctypes
from collections.abc import Iterator, Sequence

from penstock import native
from penstock.kernels.lora import MAX_SLOTS, LoraMap, LoraUpdate
from penstock.kernels.lora.rows import AdapterRows
from penstock.native import Library
from penstock.native.array import AnyDtype, Array, dtype_name, dtype_of
from penstock.native.program import call, empty_rows
from penstock.native.structs import LoraArgs, LoraMaps
from penstock.native.structs import LoraMap as MapStruct


class NativeLora:
    """See `LoraTable`."""

    def __init__(self, library: Library, rows: int, columns: int, dtype: AnyDtype) -> None:
        self._library = library
        self._rows, self._columns, self._dtype = rows, columns, dtype_name(dtype)
        self._slots = (LoraMaps * MAX_SLOTS)()
        self._held: dict[int, tuple[Sequence[LoraMap], ctypes.Array[MapStruct]]] = {}

    def put(self, slot: int, maps: Sequence[LoraMap]) -> None:
        assert slot not in self._held
        if not maps:
            return
        structs = list(self._structs(maps))
        array = (MapStruct * len(structs))(*structs)
        self._held[slot] = maps, array
        self._slots[slot].maps, self._slots[slot].count = ctypes.addressof(array), len(array)

    def _structs(self, maps: Sequence[LoraMap]) -> Iterator[MapStruct]:
        """Yield maps that cover all rows: maps of LoRA rank 0 fill the gaps."""
        first = first_rank = 0
        for lora in maps:
            rank = len(lora.a)
            assert lora.first >= first
            assert (lora.a.shape, lora.b.shape) == ((rank, self._columns), (rank, lora.rows))
            assert dtype_name(lora.a.dtype) == dtype_name(lora.b.dtype) == self._dtype
            assert lora.a.is_contiguous()
            assert lora.b.is_contiguous()
            if lora.first > first:
                yield MapStruct(None, None, first, lora.first - first, first_rank, 0, 0.0)
            yield MapStruct(lora.a.data_ptr(), lora.b.data_ptr(), lora.first, lora.rows, first_rank, rank, lora.scale)
            first, first_rank = lora.first + lora.rows, first_rank + rank
        if first < self._rows:
            yield MapStruct(None, None, first, self._rows - first, first_rank, 0, 0.0)

    def clear(self, slot: int) -> None:
        self._slots[slot].maps, self._slots[slot].count = None, 0
        self._held.pop(slot, None)

    def update(self, x: Array, rows: AdapterRows) -> LoraUpdate | None:
        assert dtype_name(x.dtype) == self._dtype
        added = empty_rows(x, (self._rows,), dtype_of("float32"))
        arguments = LoraArgs(
            adapters=rows.handle,
            slots=ctypes.addressof(self._slots),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            dtype=native.dtype_code(x.dtype),
            columns=self._columns,
            y=added.data_ptr(),
            y_columns=self._rows,
        )
        call(self._library, x, arguments)
        return LoraUpdate(added, rows)


class LoraKernels:
    """Makes tables whose updates the library computes."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def new_lora(self, rows: int, columns: int, dtype: AnyDtype, device: str) -> NativeLora:
        """See `NewLora`."""
        assert str(device) == "cpu"
        return NativeLora(self._library, rows, columns, dtype)
