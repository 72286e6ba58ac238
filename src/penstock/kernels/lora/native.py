"""LoRA updates by the native library (`csrc/lora.cpp`)."""

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.kernels.lora import MAX_SLOTS, LoraMap, LoraUpdate
from penstock.kernels.lora.rows import AdapterRows
from penstock.native import Library
from penstock.native.array import AnyDtype, Array, dtype_name, dtype_of
from penstock.native.program import call, empty_rows
from penstock.native.structs import LoraArgs, LoraLookupArgs, LoraMaps
from penstock.native.structs import LoraMap as MapStruct


class Slots:
    """The library's structs of several tables: [slots, tables]."""

    def __init__(self, num_tables: int = 1) -> None:
        self._num_tables = num_tables
        self._memory = np.zeros(MAX_SLOTS * num_tables * ctypes.sizeof(LoraMaps), np.uint8)  # untouched until used
        self._held: dict[tuple[int, int], object] = {}
        self.handle = self._memory.ctypes.data
        """Address of the first."""

    def put(
        self, slot: int, table: int, maps: Sequence[LoraMap[Array]], structs: Sequence[MapStruct], rows: int
    ) -> None:
        """Fill the struct of a table's slot with `structs` of these maps, which cover `rows` rows."""
        assert (slot, table) not in self._held
        array, factors = (MapStruct * len(structs))(*structs), _factors(maps, rows)
        self._held[slot, table] = maps, array, factors
        struct = self._struct(slot, table)
        struct.maps, struct.count = ctypes.addressof(array), len(array)
        struct.factors = None if factors is None else factors.ctypes.data

    def clear(self, slot: int, table: int) -> None:
        """Empty the struct of a table's slot."""
        if self._held.pop((slot, table), None) is not None:
            struct = self._struct(slot, table)
            struct.maps, struct.count, struct.factors = None, 0, None

    def _struct(self, slot: int, table: int) -> LoraMaps:
        place = (slot * self._num_tables + table) * ctypes.sizeof(LoraMaps)
        return LoraMaps.from_address(self.handle + place)


def _factors(maps: Sequence[LoraMap[Array]], rows: int) -> NDArray[np.float32] | None:
    """The factors of all rows of a table; None: all are 1."""
    if all(lora_map.factors is None for lora_map in maps):
        return None
    factors = np.ones(rows, np.float32)
    for lora_map in maps:
        if lora_map.factors is not None:
            factors[lora_map.first : lora_map.first + lora_map.rows] = lora_map.factors
    return factors


class NativeLora:
    """See `LoraTable`."""

    def __init__(
        self, library: Library, rows: int, columns: int, dtype: AnyDtype, slots: Slots | None = None, table: int = 0
    ) -> None:
        """
        Args:
            slots: shared with the tables of other experts; this one is number `table`.
        """
        self._library = library
        self._rows, self._columns, self._dtype = rows, columns, dtype_name(dtype)
        self.slots, self._table = slots or Slots(), table

    def put(self, slot: int, maps: Sequence[LoraMap[Array]]) -> None:
        if maps:
            self.slots.put(slot, self._table, maps, list(self._structs(maps)), self._rows)

    def _structs(self, maps: Sequence[LoraMap[Array]]) -> Iterator[MapStruct]:
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
        self.slots.clear(slot, self._table)

    def update(self, x: Array, rows: AdapterRows, *, column: int = 0) -> LoraUpdate[Array] | None:
        assert dtype_name(x.dtype) == self._dtype
        added = empty_rows(x, (self._rows,), dtype_of("float32"))
        arguments = LoraArgs(
            adapters=rows.handle,
            slots=self.slots.handle,
            x=x.data_ptr() + column * x.dtype.itemsize,
            x_stride=x.stride(0),
            dtype=native.dtype_code(x.dtype),
            columns=self._columns,
            y=added.data_ptr(),
            y_columns=self._rows,
        )
        call(self._library, x, arguments)
        return LoraUpdate(added, rows, slots=self.slots.handle)


class NativeLookup:
    """See `LookupTable`."""

    def __init__(self, library: Library, columns: int, dtype: AnyDtype) -> None:
        self._library, self._columns, self._dtype = library, columns, dtype_name(dtype)
        self._slots = Slots()

    def put(self, slot: int, maps: Sequence[LoraMap[Array]]) -> None:
        (lora_map,) = maps
        rank = lora_map.a.shape[1]
        assert lora_map.b.shape == (rank, self._columns)
        assert dtype_name(lora_map.a.dtype) == dtype_name(lora_map.b.dtype) == self._dtype
        struct = MapStruct(lora_map.a.data_ptr(), lora_map.b.data_ptr(), 0, self._columns, 0, rank, lora_map.scale)
        self._slots.put(slot, 0, maps, [struct], self._columns)

    def clear(self, slot: int) -> None:
        self._slots.clear(slot, 0)

    def add(self, y: Array, row_ids: Array, rows: AdapterRows) -> None:
        assert dtype_name(y.dtype) == self._dtype
        assert y.is_contiguous()
        arguments = LoraLookupArgs(
            adapters=rows.handle,
            slots=self._slots.handle,
            row_ids=row_ids.data_ptr(),
            y=y.data_ptr(),
            dtype=native.dtype_code(y.dtype),
            columns=self._columns,
        )
        call(self._library, y, arguments)


class LoraKernels:
    """Makes tables whose updates the library computes."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def new_lora(self, rows: int, columns: int, dtype: AnyDtype, device: str) -> NativeLora:
        """See `NewLora`."""
        assert str(device) == "cpu"
        return NativeLora(self._library, rows, columns, dtype)

    def new_expert_lora(
        self, count: int, rows: int, columns: int, dtype: AnyDtype, device: str
    ) -> Sequence[NativeLora]:
        """See `NewExpertLora`."""
        assert str(device) == "cpu"
        slots = Slots(count)
        return [NativeLora(self._library, rows, columns, dtype, slots, table) for table in range(count)]

    def new_lookup_table(self, columns: int, dtype: AnyDtype, device: str) -> NativeLookup:
        """See `NewLookupTable`."""
        assert str(device) == "cpu"
        return NativeLookup(self._library, columns, dtype)
