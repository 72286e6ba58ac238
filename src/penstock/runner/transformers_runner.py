"""The runner of a model that `transformers` computes (`--backend transformers`)."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from penstock.kernels.recurrent.states import StateCache
from penstock.kernels.reference_ops import reference_ops
from penstock.runner.device_runner import DeviceRunner
from penstock.runner.forward import KVCache, build_batch
from penstock.runner.torch_device import empty_device_cache
from penstock.runner.transformers_model import (
    PagedAttention,
    attach,
    load_transformers_model,
    read_transformers_model,
)

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from penstock.checkpoint.checkpoint import Checkpoint
    from penstock.config.settings import Settings
    from penstock.core.plan import ForwardPlan
    from penstock.kernels.ops import Ops
    from penstock.system.start import Start

logger = logging.getLogger(__name__)


class TransformersForward:
    """Runs a model of `transformers` in each step. See `Forward` for the methods."""

    def __init__(
        self, model: Any, attention: Sequence[PagedAttention], cache: KVCache[Tensor], ops: Ops[Tensor], device: str
    ) -> None:
        self._model, self._attention, self._cache, self._ops, self._device = model, attention, cache, ops, device
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._inputs: dict[str, Tensor] = {}

    def run(self, plan: ForwardPlan, block_tables: list[list[array[int]]]) -> Tensor:
        batches = [
            build_batch(plan, tables, self._cache.block_size, self._ops, self._device, group)
            for group, tables in enumerate(block_tables)
        ]
        self._cache.back([batch.pool_blocks for batch in batches])
        for attention, batch in zip(self._attention, self._cache.by_layer(batches), strict=True):
            attention.batch = batch
        ids, positions = (batches[0].tensor(name)[None] for name in ("token_ids", "positions"))
        self._inputs = {"input_ids": ids, "position_ids": positions}
        return self.logits(plan.sampled_rows)

    def logits(self, rows: list[int]) -> Tensor:
        """Computes the step again where more rows are asked for than `run` knew of: it writes the same keys."""
        wanted = self._ops.constant(np.array(rows, np.int64), None, self._device)
        chosen = {"logits_to_keep": wanted} if self._picks_rows else {}
        found: Tensor = self._model(**self._inputs, use_cache=False, **chosen).logits[0]
        return (found if self._picks_rows else found[wanted]).float().contiguous()


class TransformersRunner(DeviceRunner[Tensor]):
    """A `DeviceRunner` whose model is of `transformers`: without adapters, images and hidden states.

    Raises:
        CheckpointError: the model cannot run this way, or its weights are damaged.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings, start: Start | None = None) -> None:
        super().__init__(checkpoint, settings, reference_ops(), start)

    def _load(self, checkpoint: Checkpoint, settings: Settings, start: Start) -> None:
        found = read_transformers_model(checkpoint)
        logger.warning(
            "transformers computes %s: more slowly, and an answer may depend on what else is in its batch",
            checkpoint.name,
        )
        with self._ops.inference():
            loaded = load_transformers_model(checkpoint, found, settings.dtype, self._device)
            self._cache = KVCache([layer.kv for layer in found.layers], settings, self._ops)
            attention = [
                PagedAttention(cache, layer)
                for cache, layer in zip(self._cache.layers, found.layers, strict=True)
                if cache is not None and not isinstance(cache, StateCache)
            ]
            attach(loaded, attention)
        self._adapters = self.hidden = self.images = self._audio = None
        self._forward = TransformersForward(loaded, attention, self._cache, self._ops, self._device)

    def close(self) -> None:
        del self._cache, self._forward
        empty_device_cache(self._device)
