"""A decoder recorded as native programs, so that a step costs a call for all of its layers and one for its logits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.kv_store import PackedCache
from penstock.kernels.paged_attention import Batch, PackedBatch
from penstock.models.decoder import Decoder
from penstock.native.program import Program, Rows


class RecordedLayers:
    """`Decoder.run_layers` over packed caches, for steps of up to `max_tokens` tokens."""

    def __init__(self, model: Decoder, caches: Sequence[PackedCache], max_tokens: int, dtype: torch.dtype) -> None:
        self._program = Program(max_tokens)
        self._batch = PackedBatch(np.zeros(1, np.int64), 0, 0, 0)
        angles = model.rotary.angles(torch.zeros(1, dtype=torch.int64))
        self._x = self._program.rows((model.config.hidden_size,), dtype)
        self._angles = self._program.rows(tuple(angles.shape[1:]), angles.dtype)
        x, residual = model.run_layers(self._x, self._angles, self._batch, caches)
        assert isinstance(x, Rows)
        assert isinstance(residual, Rows)
        self._results = (x.memory, residual.memory)

    def __call__(self, x: Tensor, angles: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """As `Decoder.run_layers`; behind the results' rows come others, and the next step overwrites them."""
        assert isinstance(batch, PackedBatch)
        num_tokens = len(x)
        self._x.memory[:num_tokens] = x
        self._angles.memory[:num_tokens] = angles
        self._batch.become(batch)
        self._program.run(num_tokens)
        return self._results


class RecordedHead:
    """`Decoder.logits`, for up to `max_rows` rows on memory that is kept: of a new allocation of this size the system
    would clear every page, step after step.
    """

    def __init__(self, model: Decoder, max_rows: int, dtype: torch.dtype) -> None:
        self._model, self._max_rows = model, max_rows
        self._program = Program(max_rows)
        self._x, self._residual = (self._program.rows((model.config.hidden_size,), dtype) for _ in range(2))
        logits = model.project(self._x, self._residual)
        assert isinstance(logits, Rows)
        self._logits = logits

    def __call__(self, x: Tensor, residual: Tensor, sampled_rows: Tensor) -> Tensor:
        """As `Decoder.logits`; the result is overwritten by the next call."""
        count = len(sampled_rows)
        if not 0 < count <= self._max_rows:
            return self._model.logits(x, residual, sampled_rows)
        torch.index_select(x, 0, sampled_rows, out=self._x.memory[:count])
        torch.index_select(residual, 0, sampled_rows, out=self._residual.memory[:count])
        self._program.run(count)
        return self._model.scale_logits(self._logits.memory[:count])
