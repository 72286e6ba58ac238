"""A model's forward pass over a step, computed call by call."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.plan import ForwardPlan
from penstock.kernels.ops import Ops
from penstock.models.model import Model
from penstock.runner.inputs import build_batch
from penstock.runner.kv_cache import KVCache


class Forward(Protocol):
    """A model over its cache."""

    def __call__(self, plan: ForwardPlan, block_tables: "list[list[array[int]]]") -> Tensor:
        """Compute a step's tokens and store their keys and values; the `logits` of the rows that are sampled.

        `block_tables`: for each cache group those of the plan's sequences.
        The next call may overwrite the result.
        """
        ...

    def logits(self, rows: list[int]) -> Tensor:
        """[len(rows), vocab_size] float32 of rows of the last step, in any order and repeated at will.

        The next call may overwrite the result.
        """
        ...


class EagerForward:
    """Runs the model's code in each step. See `Forward` for the methods."""

    def __init__(self, model: Model, cache: KVCache, ops: Ops, device: torch.device) -> None:
        self._model, self._cache, self._ops, self._device = model, cache, ops, device
        self._hidden: Sequence[Tensor] = ()

    def __call__(self, plan: ForwardPlan, block_tables: "list[list[array[int]]]") -> Tensor:
        batches = [
            build_batch(plan, tables, self._cache.block_size, self._ops, self._device) for tables in block_tables
        ]
        self._cache.back([batch.pool_blocks for batch in batches])
        token_ids, positions = batches[0].tensor("token_ids"), batches[0].tensor("positions")
        self._hidden = self._model.forward(token_ids, positions, self._cache.by_layer(batches), self._cache.layers)
        return self.logits(plan.sampled_rows)

    def logits(self, rows: list[int]) -> Tensor:
        return self._model.compute_logits(self._hidden, torch.tensor(rows, dtype=torch.int64, device=self._device))
