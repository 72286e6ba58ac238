"""Loads a model through the cache of packed weights: maps them on a hit, packs and stores them on a miss."""

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
    found = cache.find(key, start.found)
    if found is not None:
        return make(_lookup_in(found))[0]
    # Several engines may start at once; one packs, and the others map what it wrote.
    with cache.locked(key) as is_mine:
        found = cache.find(key, start.found)  # the process that held the lock may have written it
        if found is not None:
            return make(_lookup_in(found))[0]
        writer = cache.begin(key, settings.memory.weights, about(checkpoint, settings, ranks)) if is_mine else None
        if writer is None:
            return make(_no_lookup)[0]
        with closing(writer):
            return _pack_and_cache(cache, writer, ops.allocator, make)


def _pack_and_cache(cache: WeightCache, writer: PackedFileWriter, allocator: Allocator, make: Make[ModelT]) -> ModelT:
    """Load the model, packing its weights into the writer's file, and map them from the finished file."""
    # Packed straight into the file: a copy would need the memory of the weights twice.
    with allocator.in_file(writer.arena):
        model, factory = make(_no_lookup)
        weights, is_finished = _finish(writer, factory)
    found = cache.open(writer.key) if is_finished else None
    if found is not None:
        _log_usage(cache, found.path)
        _adopt(weights, _lookup_in(found))
    return model


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
    weights: dict[str, Packable] = {
        name: weight for name, weight in factory.made.items() if isinstance(weight, Packable)
    }
    packed = {name: weight.packed() for name, weight in weights.items()}
    return weights, writer.finish({name: Entry(each.form, each.parts) for name, each in packed.items()})


def _adopt(weights: Mapping[str, Packable], lookup: PackedLookup) -> None:
    """Move weights to the mapped file, whose memory all processes that map it share."""
    for name, weight in weights.items():
        mapped = lookup(name)
        assert mapped is not None
        weight.adopt(mapped)


def _no_lookup(name: str) -> Packed | None:
    """The lookup without a cache: all weights are read from the checkpoint."""
    return None


def _lookup_in(file: PackedFile) -> PackedLookup:
    def lookup(name: str) -> Packed | None:
        entry = file.get(name)
        return None if entry is None else Packed(entry.form, entry.parts)

    return lookup
