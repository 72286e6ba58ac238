"""A decoder recorded as native programs, so that a step costs one call."""

from array import array

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import ForwardPlan
from penstock.kernels.paged_attention import PackedBatch
from penstock.models.decoder import Decoder
from penstock.native.program import Program, Rows, Section, run
from penstock.runner.inputs import build_packed_inputs
from penstock.runner.kv_cache import KVCache


class RecordedForward:
    """As `Forward`, over a packed cache, for steps of up to `max_tokens` tokens.

    Logits of up to `max_rows` rows lie on memory that is kept: of a new allocation of their size the system would clear
    every page, step after step.
    """

    def __init__(self, model: Decoder, cache: KVCache, max_tokens: int, max_rows: int) -> None:
        self._model, self._cache, self._max_rows = model, cache, max_rows
        self._layers, self._head = Program(max_tokens, backed=True), Program(max_rows)
        self._batch = PackedBatch(np.zeros(1, np.int64), 0, 0, 0)
        self._token_ids, self._positions = (self._layers.rows((), torch.int64) for _ in range(2))
        attended, residual = model.attend(self._token_ids, self._positions, self._batch, cache.layers)
        assert isinstance(attended, Rows)
        assert isinstance(residual, Rows)
        self._attended = (attended.memory, residual.memory)
        self._rows = self._head.rows((), torch.int64)
        logits = model.project(*self._attended, self._rows)
        assert isinstance(logits, Rows)
        self._logits = logits

    def __call__(self, plan: ForwardPlan, block_tables: "list[array[int]]") -> Tensor:
        """As `Forward`'s; the result is overwritten by the next call."""
        inputs = build_packed_inputs(plan, block_tables, self._cache.block_size)
        self._cache.back(inputs.num_blocks)
        num_tokens = len(inputs.token_ids)
        self._token_ids.fill(inputs.token_ids, num_tokens)
        self._positions.fill(inputs.positions, num_tokens)
        self._batch.become(inputs.batch)
        layers = self._layers.section(num_tokens)
        if self._holds(plan.sampled_rows):
            return self._run_head(plan.sampled_rows, layers)
        run(layers)
        return self.logits(plan.sampled_rows)

    def logits(self, rows: list[int]) -> Tensor:
        """As `Forward`'s; the result is overwritten by the next call."""
        if self._holds(rows):
            return self._run_head(rows)
        return self._model.logits(*self._attended, torch.tensor(rows, dtype=torch.int64))

    def _holds(self, rows: list[int]) -> bool:
        return 0 < len(rows) <= self._max_rows

    def _run_head(self, rows: list[int], *before: Section) -> Tensor:
        self._rows.fill(rows, len(rows))
        run(*before, self._head.section(len(rows)))
        return self._model.scale_logits(self._logits.memory[: len(rows)])
