"""A decoder's layers recorded as one native program, so that a step costs a single call for all of them."""

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
        self._results = (x, residual)

    def __call__(self, x: Tensor, angles: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """As `Decoder.run_layers`; the results are overwritten by the next step."""
        assert isinstance(batch, PackedBatch)
        num_tokens = len(x)
        self._x.memory[:num_tokens] = x
        self._angles.memory[:num_tokens] = angles
        self._batch.become(batch)
        self._program.run(num_tokens)
        x, residual = (rows.memory[:num_tokens] for rows in self._results)
        return x, residual
