"""Computes the features of images and sounds, some layers of their tower a step, and puts them into rows of a step.

Between steps only an image's stream is kept, the output of its last layer so far. As in `encoder_runner.py`, a tower's
one cache has the keys and values of one layer: each layer overwrites those of the layer before.
"""

import itertools
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Generic, TypeAlias

import numpy as np

from penstock.api.request import MediaKind
from penstock.config.model_facts import KVSpec
from penstock.config.settings import Settings
from penstock.core.plan import EncodePart, ForwardPlan, ImageRows
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.attention import CacheShape
from penstock.kernels.batch import Batch, RecordedBatch
from penstock.kernels.cache import AnyCache
from penstock.kernels.ops import Ops
from penstock.layers.encoder_head import wide
from penstock.models.audio_encoder import AudioEncoder
from penstock.models.patches import PatchGrid
from penstock.models.tower import Tower
from penstock.native import Library
from penstock.native.array import Array, CannotRecordError, dtype_of
from penstock.native.program import Program, memory_of

log = logging.getLogger(__name__)
Encoder: TypeAlias = Tower[A] | AudioEncoder[A]


@dataclass(slots=True)
class _Encoding(Generic[A]):
    """An image whose features are not ready."""

    runner: "_TowerRunner[A]"
    grid: PatchGrid
    x: A
    """[patches, hidden_size]: the stream after `layers` layers."""
    angles: A | None
    layers: int = 0
    taps: list[A] = field(default_factory=list)


class ImageRunner(Generic[A]):
    """Holds the features of images, and the streams of those that are being encoded, by digest."""

    def __init__(self, towers: Mapping[MediaKind, Encoder[A]], ops: Ops[A], settings: Settings) -> None:
        """
        Args:
            towers: the encoder of each kind of media.
        """
        self.towers, self._ops = towers, ops
        self._runners = {
            kind: _TowerRunner(tower, ops, settings, settings.towers[kind].max_patches)
            for kind, tower in towers.items()
        }
        self._encodings: dict[bytes, _Encoding[A]] = {}
        self._features: dict[bytes, tuple[A, ...]] = {}

    def encode(self, plan: ForwardPlan) -> list[bytes]:
        """Free what the plan frees, and compute its layers; returns the digests of images with non-finite features."""
        for digest in plan.freed_images:
            self._encodings.pop(digest, None)
            self._features.pop(digest, None)
        return [part.digest for part in plan.encode if not self._encode(part)]

    def _encode(self, part: EncodePart) -> bool:
        """Compute a part; returns whether the image's features are finite, or not ready."""
        if part.first == 0:
            assert part.image is not None, "the first part has the image"
            tower = self.towers[part.image.kind]
            grid = tower.grid(part.image)
            x, runner = tower.begin(part.image, grid), self._runners[part.image.kind]
            self._encodings[part.digest] = _Encoding(runner, grid, x, tower.angles(grid))
        encoding = self._encodings[part.digest]
        assert encoding.layers == part.first, "parts follow one another"
        encoding.runner.run(encoding, part.last)
        tower = encoding.runner.tower
        if part.last < len(tower.spec.layers):
            return True
        del self._encodings[part.digest]
        features = (tower.end(encoding.x, encoding.grid), *encoding.taps)
        self._features[part.digest] = features
        return all(bool(np.isfinite(self._ops.on_host(wide(vectors, self._ops))).all()) for vectors in features)

    def place(self, x: A, depth: int, image_rows: Sequence[ImageRows]) -> None:
        """Replace these rows of `x` [any, hidden_size] by features (depth 0), or add the features of a tap to them.

        Sounds have no taps.
        """
        ops = self._ops
        for image in image_rows:
            features = self._features[image.digest]
            if depth >= len(features):
                continue
            values = features[depth][image.first : image.first + len(image.rows)]
            rows = ops.from_host(np.array(image.rows, np.int64), values)
            if depth:
                # Gathered, added, put back: there is no operation that adds to single rows of a stream.
                values = ops.add_rows(values, ops.gather(x, rows), 1.0)
            ops.scatter(values, rows, x)


class _TowerRunner(Generic[A]):
    """Runs the layers of one tower: with a cache of their keys and values, and recorded, if possible."""

    def __init__(self, tower: Encoder[A], ops: Ops[A], settings: Settings, max_patches: int) -> None:
        self.tower, self._ops, self._device = tower, ops, settings.device
        self._block_size = settings.memory.block_size
        # Each window begins a block of its own, so it may leave one partly filled.
        blocks = -(-max_patches // self._block_size) + tower.most_windows(max_patches)
        self._cache = ops.new_caches([self._cache_shape(settings, blocks)]).layers[0]
        self._recorded = None if ops.library is None else self._record(ops.library, settings, max_patches)

    def _cache_shape(self, settings: Settings, num_blocks: int) -> CacheShape:
        cache = self.tower.spec.layers[0].facts.cache
        assert isinstance(cache, KVSpec), "the layers of a tower are attention, all with heads alike"
        return CacheShape(
            num_blocks=num_blocks,
            block_size=self._block_size,
            num_heads=cache.num_heads,
            head_dim=cache.head_dim,
            dtype=self._ops.dtype(settings.dtype),
            device=self._device,
            gather_limit=2 * num_blocks * self._block_size,
        )

    def _record(self, library: Library, settings: Settings, max_patches: int) -> "_RecordedLayers | None":
        try:
            return _RecordedLayers(self.tower, self._cache, library, max_patches, settings.dtype)
        except CannotRecordError as error:
            log.warning("a tower runs eagerly, more slowly, as no recorded step has %s", error)
            return None

    def run(self, encoding: _Encoding[A], last: int) -> None:
        """Compute an image's layers up to `last`."""
        tower, grid = self.tower, encoding.grid
        whole, windows = self._lay_out((encoding.x.shape[0],)), self._lay_out(grid.windows)
        tapped = [index + 1 for index in tower.taps if encoding.layers <= index < last]
        # A recorded run ends at each tap, whose features are taken from the stream there.
        for end in sorted({*tapped, last}):
            if self._recorded is not None:
                self._recorded.run(encoding, end, whole, windows)
            else:
                for index in range(encoding.layers, end):
                    encoding.x = tower.layer(index, encoding.x, encoding.angles, whole, windows, self._cache)
            encoding.layers = end
            tap = tower.tap(end - 1, encoding.x, grid)
            if tap is not None:
                encoding.taps.append(tap)

    def _lay_out(self, lengths: Sequence[int]) -> Batch:
        """The batch of sequences of these lengths, each from a new block on."""
        ends = list(itertools.accumulate((-(-length // self._block_size) for length in lengths), initial=0))
        tables = [array("i", range(first, last)) for first, last in itertools.pairwise(ends)]
        starts, ids = [0] * len(lengths), array("i", bytes(4 * sum(lengths)))
        memory, blocks = self._ops.lay_out(lengths, starts, tables, ids, self._block_size)
        return Batch(memory, len(lengths), len(ids), blocks, self._device)


class _RecordedLayers:
    """The tower's layers as native calls, recorded once; a part of them runs from any layer to any other."""

    def __init__(self, tower: Encoder, cache: AnyCache, library: Library, max_patches: int, dtype: str) -> None:
        """
        Raises:
            CannotRecordError: the tower uses an operation that the library lacks.
        """
        self._library, self._program = library, Program(max_patches)
        self._whole, self._windows = RecordedBatch(), RecordedBatch()
        self._angles = None
        if tower.num_angles:
            self._angles = self._program.array((2, tower.num_angles), dtype_of("float32"))
        x = self._program.array((tower.spec.hidden_size,), dtype_of(dtype))
        self._streams, self._ends = [memory_of(x)], [0]
        for index in range(len(tower.spec.layers)):
            x = tower.layer(index, x, self._angles, self._whole, self._windows, cache)
            self._streams.append(memory_of(x))
            self._ends.append(self._program.num_calls)

    def run(self, encoding: _Encoding, last: int, whole: Batch, windows: Batch) -> None:
        """Replace the encoding's stream by that after `last` layers."""
        count, first = whole.num_tokens, encoding.layers
        if first == last:
            return
        self._streams[first].fill(encoding.x.numpy(), count)
        if self._angles is not None and encoding.angles is not None:
            self._angles.fill(encoding.angles.numpy(), count)
        self._whole.become(whole)
        self._windows.become(windows)
        self._library.run(self._program.segment(count, self._ends[first], self._ends[last]))
        # A copy: the next image uses the same memory of the program.
        encoding.x = Array(self._streams[last].numpy()[:count].copy())
