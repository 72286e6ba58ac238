"""A model's forward pass over a step: eager, or recorded once as native programs that run in one call per step."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from penstock.config.memory import LayerGroup
from penstock.config.model_facts import CacheSpec, KVSpec, SharedKV, StateSpec, head_bytes
from penstock.config.settings import Settings
from penstock.core.plan import BlockCopy, ForwardPlan
from penstock.kernels.array_types import A, A_co
from penstock.kernels.attention import CacheShape, LayerCaches
from penstock.kernels.batch import NO_BRANCH, Batch, RecordedBatch
from penstock.kernels.block_bytes import BlockBytes
from penstock.kernels.cache import AnyCache
from penstock.kernels.lora.rows import AdapterRows, IntArray
from penstock.kernels.ops import Ops
from penstock.kernels.recurrent.states import StateCaches, StateShape
from penstock.layers.cross_attention import CrossAttentionSpec
from penstock.models.decoder import Decoder
from penstock.models.spec import ModelSpec
from penstock.native import Library
from penstock.native.array import INT64, Array, CannotRecordError
from penstock.native.program import Program, memory_of
from penstock.native.structs import Segment
from penstock.runner.hidden_states import HiddenStates
from penstock.runner.image_points import EagerImages, RecordedImages, has_axes, stand_ins

if TYPE_CHECKING:
    from penstock.runner.adapters import LoadedAdapters
    from penstock.runner.audio_runner import AudioRunner
    from penstock.runner.image_runner import ImageRunner

_CPU_GATHER_BYTES = 2 * 2**20
"""Maximum bytes of keys gathered at a time, so that they are still in a core's cache when they are read."""

T = TypeVar("T")


class KVCache(Generic[A]):
    """The paged caches of all layers; layers of a cache group share block tables and a pool.

    On a CPU, a block takes memory when a step first uses it, so a start waits for none.
    """

    def __init__(self, kept: Sequence[CacheSpec | None], settings: Settings, ops: Ops[A]) -> None:
        """
        Args:
            kept: what each layer caches; None: nothing.
        """
        self.block_size = settings.memory.block_size
        self.groups = settings.memory.groups
        self._caches = [_new_caches(group, kept, settings, ops) for group in self.groups]
        self.layers: list[AnyCache[A] | None] = [None] * len(kept)
        """One per layer; None: the layer caches nothing."""
        self._group_of = [0] * len(kept)
        for index, group in enumerate(self.groups):
            caches: Sequence[AnyCache[A]] = self._caches[index].layers
            for layer, cache in zip(group.layers, caches, strict=True):
                self.layers[layer], self._group_of[layer] = cache, index
        for layer, cache_spec in enumerate(kept):
            # After the groups: the layer whose cache this one reads has got its own by now.
            if isinstance(cache_spec, SharedKV):
                self.layers[layer], self._group_of[layer] = (
                    self.layers[cache_spec.layer],
                    self._group_of[cache_spec.layer],
                )

    @classmethod
    def of_model(cls, spec: ModelSpec, settings: Settings, ops: Ops[A]) -> "KVCache[A]":
        """The caches of a rank's shard of a model."""
        own = spec.shard(settings.tensor_parallel_size)
        return cls([layer.facts.cache for layer in own.layers], settings, ops)

    def attend_to(self, audio: AudioRunner[A], spec: ModelSpec) -> None:
        """Let the layers that attend to audio windows read their caches; their batch follows those of the groups."""
        readers = [index for index, mixer in enumerate(spec.mixers) if isinstance(mixer, CrossAttentionSpec)]
        for layer, cache in zip(readers, audio.caches, strict=True):
            self.layers[layer], self._group_of[layer] = cache, len(self.groups)

    def by_layer(self, of_groups: Sequence[T]) -> list[T]:
        """The value of each layer's group; the main group's for layers that cache nothing."""
        return [of_groups[group] for group in self._group_of]

    def back(self, num_blocks: Sequence[int]) -> None:
        """Touch the memory of the first blocks of each group before the kernels write to them.

        Args:
            num_blocks: of the groups; those of windows, at its end, have been written.
        """
        for group, caches, count in zip(self.groups, self._caches, num_blocks, strict=False):
            caches.back(min(count, group.num_blocks))

    @property
    def blocks(self) -> list[BlockBytes] | None:
        """The blocks of each group, as bytes; None: there are states, too."""
        blocks = [caches.blocks for caches in self._caches if isinstance(caches, LayerCaches)]
        return blocks if len(blocks) == len(self._caches) else None

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, in all layers of their groups."""
        for group, caches in enumerate(self._caches):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            for layer in caches.layers if pairs else ():
                layer.copy_blocks(pairs)


def _new_caches(
    group: LayerGroup, kept: Sequence[CacheSpec | None], settings: Settings, ops: Ops[A]
) -> LayerCaches[A] | StateCaches[A]:
    """The caches of a group's layers, which hold either keys and values, or states of one shape."""
    of_group = [kept[layer] for layer in group.layers]
    if isinstance(of_group[0], StateSpec):
        parts, block_size = of_group[0].parts, settings.memory.block_size
        return ops.new_states(StateShape(len(of_group), group.num_blocks, block_size, parts, settings.device))
    shapes = [_cache_shape(spec, group.num_blocks, settings, ops) for spec in of_group if isinstance(spec, KVSpec)]
    return ops.new_caches(shapes)


def _cache_shape(kept: KVSpec, num_blocks: int, settings: Settings, ops: Ops) -> CacheShape:
    return CacheShape(
        num_blocks=num_blocks,
        block_size=settings.memory.block_size,
        num_heads=kept.num_heads,
        head_dim=kept.head_dim,
        dtype=ops.dtype(settings.kv_cache_dtype),
        device=settings.device,
        gather_limit=_gather_limit(kept, settings),
        latent=kept.latent,
    )


def _gather_limit(kept: KVSpec, settings: Settings) -> int:
    """Maximum keys that attention gathers at a time: the memory plan's number, or fewer where that is faster."""
    planned = 2 * settings.max_model_len
    if settings.device != "cpu":
        return planned
    return min(planned, _CPU_GATHER_BYTES // (kept.num_heads * head_bytes(kept.head_dim, settings.kv_cache_dtype)))


def build_batch(
    plan: ForwardPlan, block_tables: "list[array[int]]", block_size: int, ops: Ops, device: str, group: int = 0
) -> Batch:
    """The batch of `plan`'s tokens for a cache group whose sequences have these block tables."""
    # In one call, and one piece of memory: kernels get its address, a GPU a single copy.
    memory, pool_blocks = ops.lay_out(plan.query_lens, plan.starts, block_tables, plan.token_ids, block_size)
    branches = None
    for branch in plan.branches:
        if branch.group == group:
            if branches is None:
                branches = np.full((2, len(plan.query_lens)), NO_BRANCH, np.int32)
            branches[:, branch.seq_index] = branch.block, branch.after
    ends = None if plan.seen_ends is None else np.frombuffer(plan.seen_ends, np.int32)
    return Batch(memory, len(plan.query_lens), len(plan.token_ids), pool_blocks, device, branches, ends)


def build_batches(
    plan: ForwardPlan,
    block_tables: "list[list[array[int]]]",
    cache: KVCache,
    ops: Ops,
    device: str,
    audio: AudioRunner | None,
) -> list[Batch]:
    """The batches of `plan`'s tokens: for each cache group, then for the windows, if the model has any."""
    batches = [
        build_batch(plan, tables, cache.block_size, ops, device, group) for group, tables in enumerate(block_tables)
    ]
    return batches if audio is None else [*batches, audio.batch(plan)]


class Forward(Protocol[A_co]):
    """A model over its cache."""

    def run(self, plan: ForwardPlan, block_tables: "list[list[array[int]]]") -> A_co:
        """Compute a step's tokens and store their keys and values; returns the `logits` of the sampled rows.

        `block_tables`: per cache group, those of the plan's sequences.
        The next call may overwrite the result.
        """
        ...

    def logits(self, rows: list[int]) -> A_co:
        """Logits of rows of the last step, in any order and with repetitions: [len(rows), vocab_size] float32.

        The next call may overwrite the result.
        """
        ...


class PassAdapters:
    """The adapters of a step's rows, and of the rows whose logits are computed."""

    def __init__(self, loaded: LoadedAdapters | None) -> None:
        """
        Args:
            loaded: None if no request has an adapter.
        """
        self._loaded = loaded
        self._row_slots: IntArray | None = None
        self.in_layers = None if loaded is None else AdapterRows()
        """For the step's tokens; None if requests never have adapters."""
        self.in_head = None if loaded is None else AdapterRows()
        """For the rows whose logits are computed."""

    def begin_step(self, plan: ForwardPlan) -> None:
        """Set the adapters of the plan's tokens."""
        if self._loaded is not None and self.in_layers is not None:
            self._row_slots = self._loaded.row_slots(plan.adapters, plan.query_lens)
            self.in_layers.assign(self._row_slots)

    def begin_logits(self, rows: list[int]) -> None:
        """Set the adapters of these rows of the step."""
        if self.in_head is not None:
            self.in_head.assign(None if self._row_slots is None else self._row_slots[rows])


class EagerForward(Generic[A]):
    """Runs the model's code in each step. See `Forward` for the methods."""

    def __init__(
        self,
        model: Decoder[A],
        cache: KVCache[A],
        ops: Ops[A],
        device: str,
        kept: HiddenStates[A] | None = None,
        loaded: LoadedAdapters[A] | None = None,
        images: ImageRunner[A] | None = None,
        audio: AudioRunner[A] | None = None,
    ) -> None:
        self._model, self._cache, self._ops, self._device = model, cache, ops, device
        self._audio = audio
        self._kept, self._adapters = kept, PassAdapters(loaded)
        self._stand_in = None if model.spec.tower is None else model.spec.tower.stand_in
        self._images = None if images is None else EagerImages(images, ops, device, has_axes=has_axes(model.spec))
        self._hidden: Sequence[A] = ()

    def run(self, plan: ForwardPlan, block_tables: "list[list[array[int]]]") -> A:
        batches = build_batches(plan, block_tables, self._cache, self._ops, self._device, self._audio)
        self._cache.back([batch.pool_blocks for batch in batches])
        self._model.positions.prepare(batches[0].positions)
        ids = batches[0].token_ids
        if self._stand_in is not None:
            ids = stand_ins(plan, ids, self._stand_in)
        token_ids, positions = (self._on_device(column) for column in (ids, batches[0].positions))
        self._adapters.begin_step(plan)
        if self._images is not None:
            self._images.begin_step(plan, batches[0].positions, self._model.positions)
        self._hidden = self._model.forward(
            token_ids,
            positions,
            self._cache.by_layer(batches),
            self._cache.layers,
            self._adapters.in_layers,
            whole=self._kept is not None,
            images=self._images,
        )
        if self._kept is not None:
            self._ops.scatter(self._hidden[0], self._on_device(batches[0].column("slots")), self._kept.rows)
        return self.logits(plan.sampled_rows)

    def _on_device(self, column: IntArray) -> A:
        return self._ops.constant(column, self._ops.dtype("int64"), self._device)

    def logits(self, rows: list[int]) -> A:
        self._adapters.begin_logits(rows)
        row_ids = self._ops.from_host(np.array(rows, np.int64), self._hidden[0])
        return self._model.compute_logits(self._hidden, row_ids, self._adapters.in_head)


log = logging.getLogger(__name__)


def make_forward(
    model: Decoder,
    cache: KVCache,
    ops: Ops,
    device: str,
    *,
    max_tokens: int,
    max_rows: int,
    hidden: HiddenStates | None = None,
    loaded: LoadedAdapters | None = None,
    images: ImageRunner | None = None,
    audio: AudioRunner | None = None,
) -> Forward:
    """Record the model for steps of up to `max_tokens` tokens and `max_rows` samples, if possible; otherwise run it
    eagerly: without native operations, or with ranks that torch connects.

    The hidden states of all tokens are stored in `hidden`, if given.
    """
    if ops.library is not None:
        try:
            return RecordedForward(model, cache, ops, ops.library, max_tokens, max_rows, hidden, loaded, images, audio)
        except CannotRecordError as error:
            log.warning("this model runs eagerly, more slowly, as no recorded step has %s", error)
    return EagerForward(model, cache, ops, device, hidden, loaded, images, audio)


class RecordedForward:
    """Replays native calls recorded from one run of the model's code. See `Forward` for the methods.

    The output of up to `max_rows` rows of logits is kept allocated: the system would clear every page of a new
    allocation, step after step.

    Raises:
        CannotRecordError: the ranks are connected by torch.
        NoNativeKernelError: the model uses an operation that the library lacks.
    """

    def __init__(
        self,
        model: Decoder[Array],
        cache: KVCache[Array],
        ops: Ops[Array],
        library: Library,
        max_tokens: int,
        max_rows: int,
        kept: HiddenStates[Array] | None = None,
        loaded: LoadedAdapters[Array] | None = None,
        images: ImageRunner[Array] | None = None,
        audio: AudioRunner[Array] | None = None,
    ) -> None:
        self._model, self._cache, self._ops, self._library, self._max_rows = model, cache, ops, library, max_rows
        self._audio = audio
        # Two programs, as the head computes other rows, and fewer, than the layers.
        self._layers, self._head = Program(max_tokens), Program(max_rows)
        self._batches = [RecordedBatch() for _ in range(len(cache.groups) + (audio is not None))]
        # inputs first: memory of results that are no longer needed is used again by later calls
        self._token_ids, self._positions = (self._layers.array((), INT64) for _ in range(2))
        self._slots = None if kept is None else self._layers.array((), INT64)
        self._adapters = PassAdapters(loaded)
        self._stand_in = None if model.spec.tower is None else model.spec.tower.stand_in
        self._images = None if images is None else RecordedImages(images, self._layers, has_axes=has_axes(model.spec))
        hidden = model.forward(
            self._token_ids,
            self._positions,
            cache.by_layer(self._batches),
            cache.layers,
            self._adapters.in_layers,
            whole=kept is not None,
            images=self._images,
        )
        if kept is not None and self._slots is not None:
            ops.scatter(hidden[0], self._slots, kept.rows)
        self._hidden = [memory_of(part) for part in hidden]
        self._rows = self._head.array((), INT64)
        self._logits = memory_of(model.compute_logits(self._hidden, self._rows, self._adapters.in_head))

    def run(self, plan: ForwardPlan, block_tables: "list[list[array[int]]]") -> Array:
        batches = build_batches(plan, block_tables, self._cache, self._ops, "cpu", self._audio)
        self._cache.back([batch.pool_blocks for batch in batches])
        batch = batches[0]
        self._model.positions.prepare(batch.positions)
        ids = batch.token_ids if self._stand_in is None else stand_ins(plan, batch.token_ids, self._stand_in)
        self._token_ids.fill(ids, batch.num_tokens)
        self._positions.fill(batch.positions, batch.num_tokens)
        for recorded, group_batch in zip(self._batches, batches, strict=True):
            # The recorded calls have the address of the batch, so each step's takes its place.
            recorded.become(group_batch)
        if self._slots is not None:
            self._slots.fill(batch.column("slots"), batch.num_tokens)
        self._adapters.begin_step(plan)
        done = 0
        if self._images is not None:
            self._images.begin_step(plan, batch.positions, self._model.positions)
            done = self._images.run(plan.image_rows, batch.num_tokens, self._library)
        layers = self._layers.segment(batch.num_tokens, done)
        # One call of the library for layers and head: the threads stay awake between.
        if self._holds(plan.sampled_rows):
            return self._run_head(plan.sampled_rows, layers)
        self._library.run(layers)
        return self.logits(plan.sampled_rows)

    def logits(self, rows: list[int]) -> Array:
        if self._holds(rows):
            return self._run_head(rows)
        self._adapters.begin_logits(rows)
        row_ids = self._ops.from_host(np.array(rows, np.int64), self._hidden[0])
        return self._model.compute_logits(self._hidden, row_ids, self._adapters.in_head)

    def _holds(self, rows: list[int]) -> bool:
        return 0 < len(rows) <= self._max_rows

    def _run_head(self, rows: list[int], *before: Segment) -> Array:
        self._rows.fill(rows, len(rows))
        self._adapters.begin_logits(rows)
        self._library.run(*before, self._head.segment(len(rows)))
        return self._logits[: len(rows)]
