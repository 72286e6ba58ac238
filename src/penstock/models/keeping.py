"""Loads a model through the cache of packed weights."""

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock import reserve
from penstock.checkpoint import Checkpoint
from penstock.kernels.linear.weight import Packable, Packed
from penstock.models.decoder import Decoder
from penstock.models.encoder import Encoder
from penstock.models.packed_key import packed_cache, packed_key
from penstock.packed_cache import Draft, Entry, PackedCache, PackedFile, begun_for, find
from penstock.quantization.base import WeightFactory, kept_tensor, packed_tensor
from penstock.ranks import Ranks
from penstock.reserve import Reserve
from penstock.settings import Settings

log = logging.getLogger(__name__)

Kept = Callable[[str], Packed | None]
ModelT = TypeVar("ModelT", Decoder, Encoder)


def keep_packed(
    checkpoint: Checkpoint, settings: Settings, ranks: Ranks, make: Callable[[Kept], tuple[ModelT, WeightFactory]]
) -> ModelT:
    """Load the model with `make`, from cached packed weights on a hit; on a miss, write them to the cache."""
    cache = packed_cache(settings)
    key = None if cache is None else packed_key(checkpoint, settings, ranks)
    if cache is None or key is None:
        return make(_nothing)[0]
    found = find(cache, key)
    if found is not None:
        return make(_kept_in(found))[0]
    begun = begun_for(key)
    if begun is not None:
        return _make_and_keep(cache, begun, make)
    with cache.locked(key) as is_mine:
        found = find(cache, key)  # the process that held the lock may have written it
        if found is not None:
            return make(_kept_in(found))[0]
        draft = cache.begin(key, settings.memory.weights) if is_mine else None
        if draft is None:
            return make(_nothing)[0]
        with closing(draft), reserve.opened(Reserve(None, draft.arena)):
            return _make_and_keep(cache, draft, make)


def _make_and_keep(cache: PackedCache, draft: Draft, make: Callable[[Kept], tuple[ModelT, WeightFactory]]) -> ModelT:
    """Load the model, whose weights are packed into the draft, and map them from the file that it becomes."""
    model, factory = make(_nothing)
    made = {name: weight for name, weight in factory.made.items() if isinstance(weight, Tensor | Packable)}
    entries = {}
    for name, weight in made.items():
        packed = packed_tensor(weight) if isinstance(weight, Tensor) else weight.packed()
        entries[name] = Entry(packed.form, tuple(_bytes_of(part) for part in packed.parts))
    found = cache.open(draft.key) if draft.finish(entries) else None
    if found is not None:
        log.info("packed weights are cached in %s", found.path)
        _adopt(made, _kept_in(found))
    return model


def _adopt(made: Mapping[str, Tensor | Packable], kept: Kept) -> None:
    """Replace the memory of weights by the mapped file, which all processes that map it share."""
    for name, weight in made.items():
        mapped = kept(name)
        assert mapped is not None
        if not isinstance(weight, Tensor):
            weight.adopt(mapped)
        elif (tensor := kept_tensor(mapped, tuple(weight.shape), weight.dtype)) is not None:
            weight.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _nothing(name: str) -> Packed | None:
    return None


def _kept_in(file: PackedFile) -> Kept:
    def kept(name: str) -> Packed | None:
        entry = file.get(name)
        return None if entry is None else Packed(entry.form, tuple(map(torch.from_numpy, entry.parts)))

    return kept


def _bytes_of(part: Tensor) -> "np.typing.NDArray[np.uint8]":
    array: np.typing.NDArray[np.uint8] = part.numpy()
    return array
