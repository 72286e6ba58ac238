"""An encoder's forward pass over whole texts, without a persistent cache or sampling.

A paged cache with room for one step holds the keys and values of one layer: each layer overwrites those of the layer
before. So attention is the decoders' kernel, without a mask.
"""

import itertools
import logging
from array import array

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.model_facts import KVSpec
from penstock.config.settings import Settings
from penstock.core.encoder import EncoderPlan
from penstock.kernels.attention import CacheShape
from penstock.kernels.batch import Batch, RecordedBatch
from penstock.kernels.cache import AnyCache
from penstock.kernels.tables import make_ops
from penstock.models.encoder import Encoder, Span
from penstock.models.registry import load_encoder
from penstock.models.spec import TableSpec
from penstock.native import Library, set_num_threads
from penstock.native.array import INT64, Array, CannotRecordError
from penstock.native.program import Program, memory_of
from penstock.runner.torch_device import empty_device_cache
from penstock.system.start import Start

log = logging.getLogger(__name__)

Numbers = NDArray[np.int64]


class EncoderRunner:
    """Holds an encoder's weights, and computes one step of texts at a time. See `VectorRunner`.

    Raises:
        CheckpointError: the checkpoint's weights are damaged, incomplete or of an unknown kind.
        NoNativeKernelError: see `DeviceRunner`.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings, start: Start | None = None) -> None:
        """
        Args:
            start: what was prepared for loading the model.
        """
        start = start or Start()
        self._device = settings.device
        self._ops = make_ops(
            self._device, gap=settings.gap, widened_weights=settings.widened_weights, allocator=start.allocator
        )
        self._block_size = settings.memory.block_size
        set_num_threads(settings.threads)  # torch's, too, if the operations are torch's
        self._load(checkpoint, settings, start)

    def _load(self, checkpoint: Checkpoint, settings: Settings, start: Start) -> None:
        """Load the model, and create its cache and forward pass."""
        with self._ops.inference():
            self._model = load_encoder(checkpoint, settings, self._ops, start)
            types = self._model.ends.token_types
            self._num_types = 0 if types is None else types.rows
            shape = self._cache_shape(settings)
            self._cache = None if shape is None else self._ops.new_caches([shape]).layers[0]
            self._recorded = self._record(settings.memory.num_tokens)

    def _cache_shape(self, settings: Settings) -> CacheShape | None:
        """None: the layers' attention reads keys and values from where they are computed."""
        shapes = {
            (cache.num_heads, cache.head_dim)
            for layer in self._model.spec.layers
            if isinstance(cache := layer.facts.cache, KVSpec)
        }
        if not shapes:
            return None
        assert len(shapes) == 1, "layers of an encoder have heads alike"
        (num_heads, head_dim) = shapes.pop()
        return CacheShape(
            num_blocks=settings.memory.num_blocks,
            block_size=self._block_size,
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=self._ops.dtype(settings.dtype),
            device=self._device,
            gather_limit=2 * settings.max_model_len,
        )

    def _record(self, max_tokens: int) -> "_Recorded | None":
        if self._ops.library is None:
            return None
        try:
            return _Recorded(self._model, self._cache, self._ops.library, max_tokens)
        except CannotRecordError as error:
            log.warning("this model runs eagerly, more slowly, as no recorded step has %s", error)
            return None

    def execute(self, plan: EncoderPlan) -> list[bytes | None]:
        """The vector of each text, float32; None if it is not finite."""
        batch, types, ends = self._lay_out(plan), _token_types(plan, self._num_types), self._model.ends
        positions = _positions(plan, batch, ends.positions)
        with self._ops.inference():
            self._model.positions.prepare(positions)
            if self._recorded is None:
                token_ids, places, type_ids = (
                    self._ops.constant(column, None, self._device)
                    for column in (batch.token_ids.astype(np.int64), positions, types)
                )
                hidden = self._model.forward(token_ids, places, type_ids, batch, self._cache)
            else:
                hidden = self._recorded.run(batch, positions, types)
            vectors = self._model.vectors(hidden, _spans(plan, ends.padding))
        return [row.tobytes() if np.isfinite(row).all() else None for row in vectors]

    def _lay_out(self, plan: EncoderPlan) -> Batch:
        """Build the batch of the texts; each starts at a new block."""
        tables, first = [], 0
        for length in plan.lengths:
            last = first - (-length // self._block_size)
            tables.append(array("i", range(first, last)))
            first = last
        starts = [0] * len(tables)
        memory, num_blocks = self._ops.lay_out(plan.lengths, starts, tables, plan.token_ids, self._block_size)
        return Batch(memory, len(tables), len(plan.token_ids), num_blocks, self._device)

    def close(self) -> None:
        """Free the memory; the runner cannot be used afterwards."""
        del self._model, self._cache, self._recorded
        empty_device_cache(self._device)


def _token_types(plan: EncoderPlan, num_types: int) -> Numbers:
    """[num_tokens]: 1 for tokens of a pair's second text, else 0; all 0 if the model has one token type."""
    types = np.zeros(len(plan.token_ids), np.int64)
    end = 0
    for length, second in zip(plan.lengths, plan.second_texts, strict=True):
        end += length
        if second and num_types > 1:
            types[end - length + second : end] = 1
    return types


def _positions(plan: EncoderPlan, batch: Batch, table: TableSpec | None) -> Numbers:
    """[num_tokens]: each token's position in its text; if tokens of padding have none, its row in the table."""
    if table is None or table.padding is None:
        return batch.positions.astype(np.int64)
    has_position = np.frombuffer(plan.token_ids, np.int32) != table.padding
    counts = np.cumsum(has_position)
    firsts = np.array(list(itertools.accumulate(plan.lengths, initial=0)))[:-1]
    before = np.repeat(counts[firsts] - has_position[firsts], plan.lengths)
    return np.where(has_position, counts - before, 0) + table.padding


def _spans(plan: EncoderPlan, padding: int | None) -> list[Span]:
    """The tokens of each text that are pooled: without those of padding at its end, but for the first one."""
    spans = []
    for first, last in itertools.pairwise(itertools.accumulate(plan.lengths, initial=0)):
        while last > first + 1 and plan.token_ids[last - 1] == padding:
            last -= 1
        spans.append((first, last))
    return spans


class _Recorded:
    """The forward pass as native calls, recorded once."""

    def __init__(self, model: Encoder[Array], cache: AnyCache[Array] | None, library: Library, max_tokens: int) -> None:
        """
        Raises:
            CannotRecordError: the model uses an operation that the library lacks.
        """
        self._library, self._program, self._batch = library, Program(max_tokens), RecordedBatch()
        self._token_ids, self._positions, self._types = (self._program.array((), INT64) for _ in range(3))
        self._hidden = memory_of(model.forward(self._token_ids, self._positions, self._types, self._batch, cache))

    def run(self, batch: Batch, positions: Numbers, types: Numbers) -> Array:
        """The hidden states [num_tokens, hidden_size] float32; the next call overwrites them."""
        count = batch.num_tokens
        self._token_ids.fill(batch.token_ids, count)
        self._positions.fill(positions, count)
        self._types.fill(types, count)
        self._batch.become(batch)
        self._library.run(self._program.segment(count))
        return self._hidden[:count]
