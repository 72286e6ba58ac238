"""Computes the keys and values of audio windows, some layers of the audio tower a step, and keeps them by digest.

    window ──stem──> stream ──layers──> stream ──layers of keys──> its slot in the cache of each text layer

Between steps only a window's stream is kept. As in `encoder_runner.py`, one cache has the keys and values of one of the
tower's own layers. The slots of windows are apart from the blocks of texts: one is written once, and read by all
sequences about its window.
"""

import itertools
from array import array
from collections.abc import Sequence
from typing import Generic

import numpy as np

from penstock.config.image_settings import largest_image_bytes
from penstock.config.model_facts import BYTES_OF, WINDOW_BLOCK, KVSpec, blocks_of_window
from penstock.config.settings import Settings
from penstock.core.plan import EncodePart, ForwardPlan
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.attention import CacheShape
from penstock.kernels.batch import Batch, IntArray
from penstock.kernels.ops import Ops
from penstock.layers.encoder_head import wide
from penstock.models.audio_tower import AudioTower


@dataclass(slots=True)
class _Encoding(Generic[A]):
    """A window whose keys are not complete."""

    x: A
    """[positions, hidden_size]: the stream after `layers` layers."""
    slot: Batch
    """Where its keys go."""
    layers: int = 0


class AudioRunner(Generic[A]):
    """Holds the keys of audio windows, and the streams of those that are being encoded, by digest."""

    def __init__(self, tower: AudioTower[A], ops: Ops[A], settings: Settings) -> None:
        (facts,) = settings.towers.values()
        self._tower, self._ops, self._device = tower, ops, settings.device
        spec = tower.spec
        self._positions, self._blocks = spec.num_positions, blocks_of_window(spec.num_positions)
        num_slots = settings.memory.image_features // largest_image_bytes(facts, BYTES_OF[settings.dtype])
        own = spec.layers[0].facts.cache
        assert isinstance(own, KVSpec)
        kept = [KVSpec(reader.num_heads, reader.head_dim) for _, reader in spec.readers]
        self._cache = ops.new_caches([self._shape(own, 1, settings)]).layers[0]
        self._whole = self._place(0)
        self.caches = ops.new_caches([self._shape(cache_spec, num_slots, settings) for cache_spec in kept]).layers
        """Of each text layer that attends to windows."""
        self._free = list(reversed(range(num_slots)))
        self._slots: dict[bytes, int] = {}
        self._encodings: dict[bytes, _Encoding[A]] = {}

    def _shape(self, kept: KVSpec, num_slots: int, settings: Settings) -> CacheShape:
        return CacheShape(
            num_blocks=num_slots * self._blocks,
            block_size=WINDOW_BLOCK,
            num_heads=kept.num_heads,
            head_dim=kept.head_dim,
            dtype=self._ops.dtype(settings.dtype),
            device=settings.device,
            gather_limit=2 * self._blocks * WINDOW_BLOCK,
        )

    def _table(self, slot: int) -> "array[int]":
        return array("i", range(slot * self._blocks, (slot + 1) * self._blocks))

    def _place(self, slot: int) -> Batch:
        """A window as one sequence, whose keys go to a slot."""
        ids = array("i", bytes(4 * self._positions))
        memory, blocks = self._ops.lay_out([self._positions], [0], [self._table(slot)], ids, WINDOW_BLOCK)
        return Batch(memory, 1, self._positions, blocks, self._device)

    def encode(self, plan: ForwardPlan) -> list[bytes]:
        """Free what the plan frees, and compute its layers; returns the digests of windows with non-finite streams."""
        for digest in plan.freed_images:
            self._encodings.pop(digest, None)
            if (slot := self._slots.pop(digest, None)) is not None:
                self._free.append(slot)
        return [part.digest for part in plan.encode if not self._encode(part)]

    def _encode(self, part: EncodePart) -> bool:
        """Compute a part; returns whether the window's stream is finite, or not complete."""
        if part.first == 0:
            assert part.image is not None, "the first part has the window"
            if part.digest not in self._slots:
                self._slots[part.digest] = self._free.pop()
            slot = self._place(self._slots[part.digest])
            self._encodings[part.digest] = _Encoding(self._tower.begin(part.image), slot)
        encoding = self._encodings[part.digest]
        assert encoding.layers == part.first, "parts follow one another"
        encoding.x = self._tower.run(
            encoding.x, part.first, part.last, self._whole, self._cache, self.caches, encoding.slot
        )
        encoding.layers = part.last
        if part.last < self._tower.num_layers:
            return True
        del self._encodings[part.digest]
        return bool(np.isfinite(self._ops.on_host(wide(encoding.x, self._ops))).all())

    def batch(self, plan: ForwardPlan) -> Batch:
        """The plan's tokens as the last queries of sequences that consist of their windows' positions."""
        return Batch(*self._columns(plan.query_lens, plan.windows), self._device)

    def _columns(self, query_lens: Sequence[int], windows: Sequence[bytes]) -> tuple[IntArray, int, int, int]:
        count, slots = len(windows), np.array([self._slots[digest] for digest in windows], np.int32)
        ends = np.fromiter(itertools.accumulate(query_lens, initial=0), np.int32, count + 1)
        tokens = int(ends[-1])
        lengths = np.full(count, self._positions, np.int32)
        tables = (slots[:, None] * self._blocks + np.arange(self._blocks, dtype=np.int32)).ravel()
        starts = np.arange(count + 1, dtype=np.int32) * self._blocks
        unused = np.zeros(3 * tokens, np.int32)  # slots, positions and ids of tokens whose keys are not written
        memory = np.concatenate((ends, lengths, starts, tables, unused)).astype(np.int32)
        return memory, count, tokens, (int(slots.max()) + 1) * self._blocks if count else 0
