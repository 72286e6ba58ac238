"""A model recorded as native programs, so that a step costs one call."""

import logging
from array import array

import torch
from torch import Tensor

from penstock.core.plan import ForwardPlan
from penstock.kernels.batch import RecordedBatch
from penstock.kernels.ops import Ops
from penstock.models.model import Model
from penstock.native import Library
from penstock.native.program import CannotRecordError, Program, RecordedTensor
from penstock.native.structs import Segment
from penstock.runner.forward import EagerForward, Forward
from penstock.runner.inputs import build_batch
from penstock.runner.kv_cache import KVCache

log = logging.getLogger(__name__)


def make_forward(
    model: Model, cache: KVCache, ops: Ops, device: torch.device, *, max_tokens: int, max_rows: int
) -> Forward:
    """The model recorded, for steps of up to `max_tokens` tokens and `max_rows` samples, or run as it is.

    It is run as it is where the operations are not the native library's, or the model uses one that the library lacks.
    """
    if ops.library is not None:
        try:
            return RecordedForward(model, cache, ops, ops.library, max_tokens, max_rows)
        except CannotRecordError as error:
            log.warning("this model is run call by call, as there is no native kernel for %s", error)
    return EagerForward(model, cache, ops, device)


class RecordedForward:
    """Runs what the model's code did once. See `Forward` for the methods.

    Logits of up to `max_rows` rows lie on memory that is kept: of a new allocation of their size the system would clear
    every page, step after step.

    Raises:
        CannotRecordError: the model uses an operation that the library lacks.
    """

    def __init__(
        self, model: Model, cache: KVCache, ops: Ops, library: Library, max_tokens: int, max_rows: int
    ) -> None:
        self._model, self._cache, self._ops, self._library, self._max_rows = model, cache, ops, library, max_rows
        self._layers, self._head = Program(max_tokens, backed=True), Program(max_rows)
        self._batches = [RecordedBatch() for _ in cache.groups]
        self._token_ids, self._positions = (self._layers.tensor((), torch.int64) for _ in range(2))
        hidden = model.forward(self._token_ids, self._positions, cache.by_layer(self._batches), cache.layers)
        self._hidden = [_recorded(part).memory for part in hidden]
        self._rows = self._head.tensor((), torch.int64)
        self._logits = _recorded(model.lm_head(self._hidden, self._rows))

    def __call__(self, plan: ForwardPlan, block_tables: "list[list[array[int]]]") -> Tensor:
        batches = [
            build_batch(plan, tables, self._cache.block_size, self._ops, torch.device("cpu")) for tables in block_tables
        ]
        self._cache.back([batch.pool_blocks for batch in batches])
        batch = batches[0]
        self._token_ids.fill(batch.token_ids, batch.num_tokens)
        self._positions.fill(batch.positions, batch.num_tokens)
        for recorded, one in zip(self._batches, batches, strict=True):
            recorded.become(one)
        layers = self._layers.segment(batch.num_tokens)
        if self._holds(plan.sampled_rows):
            return self._run_head(plan.sampled_rows, layers)
        self._library.run(layers)
        return self.logits(plan.sampled_rows)

    def logits(self, rows: list[int]) -> Tensor:
        if self._holds(rows):
            return self._run_head(rows)
        return self._model.compute_logits(self._hidden, torch.tensor(rows, dtype=torch.int64))

    def _holds(self, rows: list[int]) -> bool:
        return 0 < len(rows) <= self._max_rows

    def _run_head(self, rows: list[int], *before: Segment) -> Tensor:
        self._rows.fill(rows, len(rows))
        self._library.run(*before, self._head.segment(len(rows)))
        return self._model.scale_logits(self._logits.memory[: len(rows)])


def _recorded(tensor: Tensor) -> RecordedTensor:
    if not isinstance(tensor, RecordedTensor):
        raise CannotRecordError("a result that does not depend on the step's tokens")
    return tensor
