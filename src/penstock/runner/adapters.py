"""Loaded adapters: their weights, and their slots in the tables of the model's linear maps."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.api.request import Adapter
from penstock.checkpoint.adapters.adaptable import Adaptable, AdaptedMap, ExpertsPart
from penstock.checkpoint.adapters.folder import AdapterFiles, read_adapter
from penstock.errors import AdapterError, CheckpointError
from penstock.kernels.array_types import A
from penstock.kernels.lora import MAX_SLOTS, LookupTable, LoraMap, LoraTable
from penstock.kernels.lora.rows import NO_ADAPTER, IntArray
from penstock.kernels.ops import Ops
from penstock.native.array import dtype_of
from penstock.quantization.adapted import AdaptedEmbedding, AdaptedHeads, AdaptedRows
from penstock.quantization.dora import dora_factors

_Table = LoraTable[A] | LookupTable[A]


class _Tensors(Protocol):
    """An adapter's weights by their names in its files."""

    def read(self, name: str) -> NDArray[Any]: ...


_Weights = list[tuple[_Table[A], list[LoraMap[A]]]]
"""An adapter's weights, per table."""


class AdaptedModel(Protocol[A]):
    """A model with the tables of its maps; see `Decoder`."""

    @property
    def adapted(self) -> Mapping[str, AdaptedRows[A]]: ...

    @property
    def adapted_heads(self) -> Mapping[str, AdaptedHeads[A]]: ...

    @property
    def adapted_embeddings(self) -> Mapping[str, AdaptedEmbedding[A]]: ...


class LoadedAdapters(Generic[A]):
    """Adapters by the digest of their files."""

    def __init__(
        self,
        model: AdaptedModel[A],
        adaptable: Adaptable,
        ops: Ops[A],
        dtype: str,
        device: str,
        base_tensor: Callable[[str], NDArray[Any] | None],
    ) -> None:
        """
        Args:
            adaptable: what adapters can modify; the model has a table for each.
            base_tensor: reads the weight of a name from the model's checkpoint; None: it cannot be read.
        """
        self._model, self._adaptable, self._base_tensor = model, adaptable, base_tensor
        self._ops, self._dtype, self._device = ops, dtype, device
        self._ready: dict[str, _Weights[A]] = {}
        """Loaded but not yet in the tables, which only the step thread may modify."""
        self._lock = threading.Lock()
        self._slots: dict[str, tuple[int, _Weights[A]]] = {}
        self._free = list(range(MAX_SLOTS))[::-1]

    def load(self, adapter: Adapter) -> None:
        """Load an adapter; may be called in any thread.

        Raises:
            AdapterError: it cannot be read, or has changed since it was checked.
        """
        files = read_adapter(adapter.name, adapter.path, self._adaptable)
        # The prefix cache and the journal know it by its content, so another content needs another digest.
        if files.adapter.digest != adapter.digest:
            raise AdapterError(
                f"the files of the adapter {adapter.name!r} in {adapter.path} have changed since they were checked: "
                "unload it, and load it again"
            )
        weights = self._read(files)
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
            # In the step's thread: no step reads the tables while a slot is written.
            slot = self._free.pop()
            for table, maps in weights:
                table.put(slot, maps)
            self._slots[adapter.digest] = slot, weights
        return self._slots[adapter.digest][0]

    def _read(self, files: AdapterFiles) -> _Weights[A]:
        by_table: dict[int, tuple[_Table[A], list[LoraMap[A]]]] = {}
        try:
            tensors = files.weights()
            for stored, matrix in files.copies:
                self._check_copy(stored, matrix, tensors)
            with self._ops.inference():
                for adapted in files.maps:
                    for table, made in self._maps(adapted, tensors):
                        by_table.setdefault(id(table), (table, []))[1].append(made)
        except (CheckpointError, KeyError, OSError) as error:
            raise AdapterError(f"the adapter {files.adapter.name!r} cannot be read: {error}") from None
        for _, maps in by_table.values():
            maps.sort(key=lambda part: part.first)
        return list(by_table.values())

    def _maps(self, adapted: AdaptedMap, tensors: _Tensors) -> Iterator[tuple[_Table[A], LoraMap[A]]]:
        """The parts of an adapter's term, each with its table."""
        # copied: a mapped file must not become shorter
        a, b = (np.copy(tensors.read(name)) for name in adapted.stored_names)
        if adapted.part == "embedding":
            embedding = self._model.adapted_embeddings[adapted.matrix]
            # Ids beyond the adapter's own vocabulary are never looked up; their rows need some content.
            of_ids = np.concatenate((a.T, np.repeat(a.T[:1], embedding.rows - a.shape[1], 0)))
            of_a, of_b = self._constant(adapted, of_ids), self._constant(adapted, b.T)
            yield embedding.table, LoraMap(0, len(b), adapted.scale, of_a, of_b)
        elif adapted.matrix in self._model.adapted_heads:
            yield from self._head_maps(adapted, self._model.adapted_heads[adapted.matrix], a, b)
        elif adapted.part == "linear":
            yield self._linear_map(adapted, self._model.adapted[adapted.matrix], a, b, tensors)
        else:
            yield from self._expert_maps(adapted, adapted.part, a, b)

    def _linear_map(
        self, adapted: AdaptedMap, target: AdaptedRows[A], a: NDArray[Any], b: NDArray[Any], tensors: _Tensors
    ) -> tuple[LoraTable[A], LoraMap[A]]:
        own = target.own_rows(b)
        factors = None
        if adapted.has_magnitude:
            magnitudes = target.own_rows(np.copy(tensors.read(adapted.magnitude_name)).astype(np.float64))
            factors = dora_factors(magnitudes, adapted.scale, a, own, target, self._ops, self._device)
            if not np.isfinite(factors).all():
                raise AdapterError(f"the magnitudes of {adapted.module} are too large for the rows of its weight")
            own = own.astype(np.float32) * factors[:, None]
        of_a, of_b = self._constant(adapted, a), self._constant(adapted, own.T)
        return target.table, LoraMap(target.first, len(own), adapted.scale, of_a, of_b, factors)

    def _head_maps(
        self, adapted: AdaptedMap, target: AdaptedHeads[A], a: NDArray[Any], b: NDArray[Any]
    ) -> Iterator[tuple[LoraTable[A], LoraMap[A]]]:
        """The maps of each head's key part, transposed as its weight is, and of its value part."""
        columns, value_dim = a.shape[1], target.value_dim
        shared = self._constant(adapted, a)
        by_head = b.reshape(-1, target.key_dim + value_dim, adapted.rank)
        for head, keys, values in zip(target.heads, target.keys, target.values, strict=True):
            key, value = np.split(by_head[head], [target.key_dim])
            yield keys, LoraMap(0, columns, adapted.scale, self._constant(adapted, key.T), shared)
            yield values, LoraMap(0, value_dim, adapted.scale, shared, self._constant(adapted, value.T))

    def _expert_maps(
        self, adapted: AdaptedMap, part: ExpertsPart, a: NDArray[Any], b: NDArray[Any]
    ) -> Iterator[tuple[LoraTable[A], LoraMap[A]]]:
        """The maps of each expert: A is stored as [experts * rank, columns], B as [rows, rank * experts]."""
        experts = self._adaptable.experts[adapted.matrix]
        a_of = a.reshape(experts.count, adapted.rank, -1)
        b_of = b.reshape(len(b), adapted.rank, experts.count).transpose(2, 0, 1)
        if adapted.swapped:
            a_of, b_of = b_of.transpose(0, 2, 1), a_of.transpose(0, 2, 1)
        names = experts.names_of(part)
        for expert in range(experts.count):
            shared = self._constant(adapted, a_of[expert])
            for index, name in enumerate(names):
                size = b_of.shape[1] // len(names)
                rows = (
                    slice(index, None, len(names)) if experts.interleaved else slice(index * size, (index + 1) * size)
                )
                target = self._model.adapted[f"{adapted.matrix}.{expert}.{name}"]
                own = target.own_rows(b_of[expert, rows])
                of_rows = self._constant(adapted, own.T)
                yield target.table, LoraMap(target.first, len(own), adapted.scale, shared, of_rows)

    def _constant(self, adapted: AdaptedMap, values: NDArray[Any]) -> A:
        """A copy of A or B, or of a part of it, on the device in the model's dtype."""
        with np.errstate(all="ignore"):  # numbers that are infinite in the dtype
            converted = np.ascontiguousarray(values.astype(dtype_of(self._dtype)))
        if not np.isfinite(converted).all():
            raise AdapterError(f"{adapted.module} has weights that are not finite in {self._dtype}")
        return self._ops.constant(converted, None, self._device)

    def _check_copy(self, stored: str, matrix: str, tensors: _Tensors) -> None:
        """
        Raises:
            AdapterError: a copy of the base model's weight differs from it.
        """
        base = self._base_tensor(matrix)
        if base is None:
            raise AdapterError(f"{stored} cannot be compared with the model's: {_WITHOUT_COPIES}")
        copy, step = tensors.read(stored), 4096
        for first in range(0, len(base), step):
            mine, given = (part[first : first + step].astype(np.float32) for part in (base, copy))
            if not (np.array_equal(mine, given) or np.array_equal(mine, given.astype(base.dtype).astype(np.float32))):
                raise AdapterError(f"{stored} is not the model's, and trained embeddings are not supported")


_WITHOUT_COPIES = "save the adapter with save_embedding_layers=False"
