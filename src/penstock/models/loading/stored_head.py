"""Looks in safetensors files for an output projection that differs from the embedding, though they are tied. No torch.

`transformers` uses the stored one then. Files that cannot be read are left to the loader, which reports them.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.checkpoint.checkpoint import weight_files
from penstock.errors import CheckpointError
from penstock.models.spec import ModelNames

logger = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 32 * 2**20
_PIECE = 16 * 2**20
"""Bytes compared at a time."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor's bytes are."""

    file: Path
    kind: tuple[str, tuple[int, ...]]
    """Dtype and shape."""
    first: int
    last: int

    def pieces(self) -> Iterator[bytes]:
        with self.file.open("rb") as file:
            file.seek(self.first)
            for at in range(self.first, self.last, _PIECE):
                yield file.read(min(_PIECE, self.last - at))


def has_own_head(folder: Path, names: ModelNames) -> bool:
    """Whether the checkpoint in `folder` stores an output projection that differs from its embedding."""
    try:
        files = weight_files(folder)
        identities = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except (CheckpointError, OSError):
        return False
    return _differ(identities, names)


@lru_cache(maxsize=64)
def _differ(identities: tuple[tuple[Path, int, int], ...], names: ModelNames) -> bool:
    wanted = (f"{names.output}.weight", f"{names.embedding}.weight")
    found: dict[str, _Stored] = {}
    try:
        for file, size, _ in identities:
            found |= _tensors(file, size, wanted, names.prefixes)
        if len(found) < len(wanted):
            return False
        head, embedding = (found[name] for name in wanted)
        if head.kind == embedding.kind and all(a == b for a, b in zip(head.pieces(), embedding.pieces(), strict=True)):
            return False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    logger.warning("%s: tie_word_embeddings is true, but %s differs from %s and is used", head.file.parent, *wanted)
    return True


def _tensors(path: Path, size: int, wanted: Sequence[str], prefixes: Sequence[tuple[str, str]]) -> dict[str, _Stored]:
    """The tensors named `wanted` in a safetensors file, by the names of the model's parameters."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            return {}
        header: dict[str, Any] = json.loads(file.read(length))
    found = {}
    for stored, entry in header.items():
        if (name := renamed(stored, prefixes)) in wanted:
            first, last = (8 + length + int(at) for at in entry["data_offsets"])
            if 8 + length <= first <= last <= size:
                found[name] = _Stored(path, (str(entry["dtype"]), tuple(entry["shape"])), first, last)
    return found


def renamed(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """The name of the model's parameter for a stored tensor; see `ModelNames.prefixes`."""
    for stored, ours in prefixes:
        if name.startswith(stored):
            return ours + name.removeprefix(stored)
    return name
