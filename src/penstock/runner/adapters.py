"""Loaded adapters: their weights, and their slots in the tables of the model's linear maps."""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.api.request import Adapter
from penstock.checkpoint.adapters.folder import Adaptable, AdaptedMap, AdapterFolder, read_adapter
from penstock.checkpoint.safetensors import MappedTensors, read_header
from penstock.errors import AdapterError, CheckpointError
from penstock.kernels.lora import MAX_SLOTS, LoraMap, LoraTable
from penstock.kernels.lora.rows import NO_ADAPTER, IntArray
from penstock.kernels.ops import Ops
from penstock.native.array import dtype_of
from penstock.quantization.base import AdaptedRows

_Weights = list[tuple[LoraTable, list[LoraMap]]]
"""An adapter's weights, per table."""


class LoadedAdapters:
    """Adapters by the digest of their files."""

    def __init__(self, adapted: Mapping[str, AdaptedRows], model: Adaptable, ops: Ops, dtype: str, device: str) -> None:
        """
        Args:
            adapted: the tables to which adapter weights are added, by matrix name; includes all names in `model`.
        """
        self._adapted, self._model = adapted, model
        self._ops, self._dtype, self._device = ops, dtype, device
        self._ready: dict[str, _Weights] = {}
        """Loaded but not yet in the tables, which only the step thread may modify."""
        self._lock = threading.Lock()
        self._slots: dict[str, tuple[int, _Weights]] = {}
        self._free = list(range(MAX_SLOTS))[::-1]

    def load(self, adapter: Adapter) -> None:
        """Load an adapter; may be called in any thread.

        Raises:
            AdapterError: it cannot be read, or has changed since it was checked.
        """
        folder = read_adapter(adapter.name, adapter.path, self._model)
        if folder.adapter.digest != adapter.digest:
            raise AdapterError(
                f"the files of the adapter {adapter.name!r} in {adapter.path} have changed since they were checked: "
                "unload it, and load it again"
            )
        weights = self._read(folder)
        with self._lock:
            self._ready[adapter.digest] = weights

    def drop(self, adapter: Adapter) -> None:
        """Free an adapter's memory; called between steps."""
        with self._lock:
            self._ready.pop(adapter.digest, None)
        slot, weights = self._slots.pop(adapter.digest, (NO_ADAPTER, []))
        for table, _ in weights:
            table.clear(slot)
        if slot != NO_ADAPTER:
            self._free.append(slot)

    def row_slots(self, adapters: Sequence[Adapter | None], counts: Sequence[int]) -> IntArray | None:
        """The slot of each row of a step, with `counts` rows per sequence; None: no row has an adapter.

        All adapters must be loaded.
        """
        if not adapters:
            return None
        return np.repeat(np.array([self._slot_of(adapter) for adapter in adapters], np.int32), counts)

    def _slot_of(self, adapter: Adapter | None) -> int:
        if adapter is None:
            return NO_ADAPTER
        if adapter.digest not in self._slots:
            with self._lock:
                weights = self._ready.pop(adapter.digest)
            slot = self._free.pop()
            for table, maps in weights:
                table.put(slot, maps)
            self._slots[adapter.digest] = slot, weights
        return self._slots[adapter.digest][0]

    def _read(self, folder: AdapterFolder) -> _Weights:
        parts: dict[int, tuple[LoraTable, list[LoraMap]]] = {}
        by_table = defaultdict[int, list[LoraMap]](list)
        try:
            tensors = MappedTensors(folder.weights, read_header(folder.weights))
            for lora_map in folder.maps:
                target = self._adapted[lora_map.matrix]
                # copied: a mapped file must not become shorter
                a, b = (np.copy(tensors.read(f"{lora_map.module}.lora_{part}.weight")) for part in "AB")
                maps = by_table[id(target.table)]
                parts[id(target.table)] = target.table, maps
                maps.append(self._map(lora_map, target, a, b))
        except (CheckpointError, KeyError) as error:
            raise AdapterError(f"the adapter {folder.adapter.name!r} cannot be read: {error}") from None
        for _, maps in parts.values():
            maps.sort(key=lambda part: part.first)
        return list(parts.values())

    def _map(self, one: AdaptedMap, target: AdaptedRows, given_a: NDArray[Any], given_b: NDArray[Any]) -> LoraMap:
        given = given_a, target.own_rows(given_b).T
        with np.errstate(all="ignore"):  # numbers that are infinite in the dtype
            a, b = (np.ascontiguousarray(part.astype(dtype_of(self._dtype))) for part in given)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise AdapterError(f"{one.module} has weights that are not finite in {self._dtype}")
        on_device = (self._ops.constant(part, None, self._device) for part in (a, b))
        return LoraMap(target.first, b.shape[1], one.scale, *on_device)
