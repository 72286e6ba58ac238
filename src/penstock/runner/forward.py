"""A model's forward pass over a step."""

from array import array

import torch
from torch import Tensor

from penstock.core.plan import ForwardPlan
from penstock.models.decoder import Decoder
from penstock.runner.inputs import build_inputs
from penstock.runner.kv_cache import KVCache


class Forward:
    """A decoder over its cache, computed call by call. Attention gathers up to `gather_limit` keys at one time."""

    def __init__(self, model: Decoder, cache: KVCache, gather_limit: int, device: torch.device) -> None:
        self._model, self._cache, self._gather_limit, self._device = model, cache, gather_limit, device
        self._attended: tuple[Tensor, Tensor] | None = None

    def __call__(self, plan: ForwardPlan, block_tables: "list[array[int]]") -> Tensor:
        """Compute a step's tokens and store their keys and values; the `logits` of the rows that are sampled."""
        inputs = build_inputs(plan, block_tables, self._cache.block_size, self._gather_limit, self._device)
        self._attended = self._model.attend(inputs.token_ids, inputs.positions, inputs.batch, self._cache.layers)
        return self._model.logits(*self._attended, inputs.sampled_rows)

    def logits(self, rows: list[int]) -> Tensor:
        """[len(rows), vocab_size] float32 of rows of the last step, in any order and repeated at will."""
        assert self._attended is not None
        return self._model.logits(*self._attended, torch.tensor(rows, device=self._device))
