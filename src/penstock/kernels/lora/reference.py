"""LoRA updates in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.lora import LoraMap, LoraUpdate
from penstock.kernels.lora.rows import AdapterRows


class ReferenceLora:
    """See `LoraTable`."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
        self._rows, self._device = rows, device
        self._slots: dict[int, Sequence[LoraMap]] = {}

    def put(self, slot: int, maps: Sequence[LoraMap]) -> None:
        assert slot not in self._slots
        self._slots[slot] = maps

    def clear(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def update(self, x: Tensor, rows: AdapterRows) -> LoraUpdate | None:
        if rows.is_empty:
            return None
        added = torch.full((len(x), self._rows), -0.0, device=self._device)
        for slot, of_slot in rows.runs():
            row_ids = torch.from_numpy(of_slot).long().to(self._device)
            for part in self._slots.get(slot, ()):
                ranks = x[row_ids].float() @ part.a.float().T * part.scale
                added[row_ids, part.first : part.first + part.rows] = ranks @ part.b.float()
        return LoraUpdate(added, rows)
