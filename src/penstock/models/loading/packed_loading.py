"""Loads a model through the cache of packed weights: maps them on a hit, packs and stores them on a miss.

Loads of a model with and without encoders share a file: one that packs more than the file has replaces it by a file
that has both.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.byte_counts import in_words
from penstock.config.settings import Settings
from penstock.kernels.linear.weight import Packable, Packed
from penstock.kernels.ops import Ops
from penstock.models.decoder import Decoder
from penstock.models.loading.packed_key import about, packed_cache, packed_key
from penstock.quantization.base import WeightFactory
from penstock.system.allocator import Allocator
from penstock.system.packed_file import Entry, PackedFile, PackedFileWriter
from penstock.system.start import Start
from penstock.system.weight_cache import WeightCache

if TYPE_CHECKING:
    from penstock.models.encoder import Encoder

log = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", Decoder, "Encoder")
PackedLookup = Callable[[str], Packed | None]
"""Returns the packed form of a weight from the cache by its name in `WeightFactory.made`; None on a miss."""
Make = Callable[[PackedLookup], tuple[ModelT, WeightFactory]]
"""Builds a model, and loads and packs the weights that the lookup lacks."""


def load_through_cache(
    checkpoint: Checkpoint, settings: Settings, ops: Ops, start: Start, make: Make[ModelT]
) -> ModelT:
    """Load the model with `make`, from cached packed weights on a hit; on a miss, write them to the cache."""
    cache, ranks = packed_cache(settings), ops.collective.ranks
    key = None if cache is None else packed_key(checkpoint, settings, ranks)
    if cache is None or key is None:
        return make(_no_lookup)[0]
    description = about(checkpoint, settings, ranks)
    found = cache.find(key, start.found)
    if found is None:
        # Several engines may start at once; one packs, and the others map what it wrote.
        with cache.locked(key) as is_mine:
            found = cache.find(key, start.found)  # the process that held the lock may have written it
            if found is None:
                writer = cache.begin(key, settings.memory.weights, description) if is_mine else None
                if writer is None:
                    return make(_no_lookup)[0]
                with closing(writer):
                    return _pack_and_cache(cache, writer, ops.allocator, make)
    lookup = _MappedWeights(found)
    model, factory = make(lookup)
    weights = _packable(factory)
    if not weights.keys() <= found.entries.keys() and _complete(cache, found, weights, description):
        lookup.release()
    return model


def _pack_and_cache(cache: WeightCache, writer: PackedFileWriter, allocator: Allocator, make: Make[ModelT]) -> ModelT:
    """Load the model, packing its weights into the writer's file, and map them from the finished file."""
    # Packed straight into the file: a copy would need the memory of the weights twice.
    with allocator.in_file(writer.arena):
        model, factory = make(_no_lookup)
        weights, is_finished = _finish(writer, factory)
    found = cache.open(writer.key) if is_finished else None
    if found is not None:
        _log_usage(cache, found.path)
        _adopt(weights, _MappedWeights(found))
    return model


def _complete(cache: WeightCache, found: PackedFile, weights: Mapping[str, Packable], description: str) -> bool:
    """Replace a file by one that also has the weights that it lacks, and map them all from that; False if that fails.

    Other processes that map the old file keep it until they end.
    """
    with cache.locked(found.key) as is_mine:
        newest = cache.find(found.key) or found  # another process may have completed it meanwhile
        lacking = weights.keys() - newest.entries.keys()
        if lacking:
            if not is_mine:
                return False
            added = {name: weights[name].packed() for name in weights if name in lacking}
            entries = {**newest.entries, **{name: Entry(each.form, each.parts) for name, each in added.items()}}
            size = sum(part.nbytes for entry in entries.values() for part in entry.parts)
            writer = cache.begin(found.key, size, description)
            if writer is None:
                return False
            with closing(writer):
                is_finished = writer.finish(entries)
            written = cache.open(found.key) if is_finished else None
            if written is None:
                return False
            newest = written
            _log_usage(cache, newest.path)
    _adopt(weights, _MappedWeights(newest))
    return True


def _log_usage(cache: WeightCache, path: Path) -> None:
    """Log what a new file takes of the disk."""
    try:
        size, (held, most) = path.stat().st_size, cache.usage()
    except OSError:  # deleted meanwhile
        return
    log.info(
        "%s of packed weights are cached in %s, now %s of at most %s (`penstock cache` lists and empties it)",
        *(in_words(size), path.parent, in_words(held), in_words(most)),
    )


def _finish(writer: PackedFileWriter, factory: WeightFactory) -> tuple[dict[str, Packable], bool]:
    """Complete the file with the factory's weights; returns them, and whether that succeeded."""
    weights = _packable(factory)
    packed = {name: weight.packed() for name, weight in weights.items()}
    return weights, writer.finish({name: Entry(each.form, each.parts) for name, each in packed.items()})


def _packable(factory: WeightFactory) -> dict[str, Packable]:
    """The weights of a model whose packed form can be cached, by name."""
    return {name: weight for name, weight in factory.made.items() if isinstance(weight, Packable)}


def _adopt(weights: Mapping[str, Packable], lookup: PackedLookup) -> None:
    """Move weights to the mapped file, whose memory all processes that map it share."""
    for name, weight in weights.items():
        mapped = lookup(name)
        assert mapped is not None
        weight.adopt(mapped)


def _no_lookup(name: str) -> Packed | None:
    """The lookup without a cache: all weights are read from the checkpoint."""
    return None


class _MappedWeights:
    """The lookup in a file, which it maps until `release`: a model's layers keep the factory that has the lookup."""

    def __init__(self, file: PackedFile) -> None:
        self._file: PackedFile | None = file

    def __call__(self, name: str) -> Packed | None:
        assert self._file is not None
        entry = self._file.get(name)
        return None if entry is None else Packed(entry.form, entry.parts)

    def release(self) -> None:
        """Let go of the file."""
        self._file = None
