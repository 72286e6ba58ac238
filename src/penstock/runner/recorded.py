"""A decoder recorded as native programs, so that a step costs one call."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.kv_store import PackedCache
from penstock.kernels.paged_attention import PackedBatch
from penstock.models.decoder import Decoder
from penstock.native.program import Program, Rows, Section, run
from penstock.runner.inputs import StepInputs


class RecordedForward:
    """As `Forward`, over packed caches, for steps of up to `max_tokens` tokens.

    Logits of up to `max_rows` rows lie on memory that is kept: of a new allocation of their size the system would clear
    every page, step after step.
    """

    def __init__(self, model: Decoder, caches: Sequence[PackedCache], max_tokens: int, max_rows: int) -> None:
        self._model, self._max_rows = model, max_rows
        self._layers, self._head = Program(max_tokens), Program(max_rows)
        self._batch = PackedBatch(np.zeros(1, np.int64), 0, 0, 0)
        self._token_ids, self._positions = (self._layers.rows((), torch.int64) for _ in range(2))
        attended, residual = model.attend(self._token_ids, self._positions, self._batch, caches)
        assert isinstance(attended, Rows)
        assert isinstance(residual, Rows)
        self._attended = (attended.memory, residual.memory)
        self._rows = self._head.rows((), torch.int64)
        logits = model.project(*self._attended, self._rows)
        assert isinstance(logits, Rows)
        self._logits = logits

    def __call__(self, inputs: StepInputs) -> Tensor:
        """As `Forward`'s; the result is overwritten by the next call."""
        assert isinstance(inputs.batch, PackedBatch)
        self._token_ids.fill(inputs.token_ids)
        self._positions.fill(inputs.positions)
        self._batch.become(inputs.batch)
        layers = self._layers.section(len(inputs.token_ids))
        if self._holds(inputs.sampled_rows):
            return self._run_head(inputs.sampled_rows, layers)
        run(layers)
        return self.logits(inputs.sampled_rows)

    def logits(self, rows: Tensor) -> Tensor:
        """As `Forward`'s; the result is overwritten by the next call."""
        if self._holds(rows):
            return self._run_head(rows)
        return self._model.logits(*self._attended, rows)

    def _holds(self, rows: Tensor) -> bool:
        return 0 < len(rows) <= self._max_rows

    def _run_head(self, rows: Tensor, *before: Section) -> Tensor:
        self._rows.fill(rows)
        run(*before, self._head.section(len(rows)))
        return self._model.scale_logits(self._logits.memory[: len(rows)])
