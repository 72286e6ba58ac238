"""LoRA updates in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.arrays import tensor_of
from penstock.kernels.lora import LoraMap, LoraUpdate
from penstock.kernels.lora.rows import AdapterRows


class _Slots:
    def __init__(self) -> None:
        self._slots: dict[int, Sequence[LoraMap[Tensor]]] = {}

    def put(self, slot: int, maps: Sequence[LoraMap[Tensor]]) -> None:
        assert slot not in self._slots
        self._slots[slot] = maps

    def clear(self, slot: int) -> None:
        self._slots.pop(slot, None)


class ReferenceLora(_Slots):
    """See `LoraTable`. DoRA (arXiv:2402.09353) also multiplies the weight's own products, by `factors`."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self._rows, self._columns, self._device = rows, columns, device

    def update(self, x: Tensor, rows: AdapterRows, *, column: int = 0) -> LoraUpdate[Tensor] | None:
        if rows.is_empty:
            return None
        x = x[:, column : column + self._columns]
        added = torch.full((len(x), self._rows), -0.0, device=self._device)
        factors: Tensor | None = None
        for slot, of_slot in rows.runs():
            row_ids = torch.from_numpy(of_slot).long().to(self._device)
            for part in self._slots.get(slot, ()):
                columns = slice(part.first, part.first + part.rows)
                ranks = x[row_ids].float() @ part.a.float().T * part.scale
                added[row_ids, columns] = ranks @ part.b.float()
                if part.factors is not None:
                    factors = torch.ones_like(added) if factors is None else factors
                    factors[row_ids, columns] = tensor_of(part.factors).to(self._device)
        return LoraUpdate(added, rows, factors=factors)


def new_expert_lora(count: int, rows: int, columns: int, dtype: torch.dtype, device: str) -> list[ReferenceLora]:
    """See `NewExpertLora`."""
    return [ReferenceLora(rows, columns, dtype, device) for _ in range(count)]


class ReferenceLookup(_Slots):
    """See `LookupTable`."""

    def __init__(self, columns: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self._device = device

    def add(self, y: Tensor, row_ids: Tensor, rows: AdapterRows) -> None:
        for slot, of_slot in rows.runs():
            places = torch.from_numpy(of_slot).long().to(self._device)
            for part in self._slots.get(slot, ()):
                update = (part.a[row_ids[places]].float() * part.scale) @ part.b.float()
                y[places] = (y[places].float() + update).to(y.dtype)
