"""Looks for embeddings and output projections in a checkpoint's safetensors files. No torch.

`transformers` uses an output projection that differs from the embedding, though they are tied. Files that cannot be
read are left to the loader, which reports them.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.checkpoint import weight_files
from penstock.checkpoint.safetensors import MappedTensors, StoredTensor, read_header
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError
from penstock.models.spec import ModelNames

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_PIECE = 16 * 2**20
"""Bytes compared at a time."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor's bytes are."""

    file: Path
    tensor: StoredTensor

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape."""
        return self.tensor.dtype, self.tensor.shape

    def pieces(self) -> Iterator[bytes]:
        with self.file.open("rb") as file:
            file.seek(self.tensor.first)
            for at in range(self.tensor.first, self.tensor.last, _PIECE):
                yield file.read(min(_PIECE, self.tensor.last - at))


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
        for file, _, _ in identities:
            tensors = {renamed(name, names.prefixes): tensor for name, tensor in read_header(file).items()}
            found |= {name: _Stored(file, tensors[name]) for name in wanted if name in tensors}
        if len(found) < len(wanted):
            return False
        head, embedding = (found[name] for name in wanted)
        if head.kind == embedding.kind and all(a == b for a, b in zip(head.pieces(), embedding.pieces(), strict=True)):
            return False
    except (CheckpointError, OSError, ValueError):  # ValueError: a file that becomes shorter
        return False
    logger.warning("%s: tie_word_embeddings is true, but %s differs from %s and is used", head.file.parent, *wanted)
    return True


def renamed(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """The name of the model's parameter for a stored tensor; see `ModelNames.prefixes`."""
    for stored, ours in prefixes:
        if name.startswith(stored):
            return ours + name.removeprefix(stored)
    return name


def stored_tensor(folder: Path, names: ModelNames, name: str) -> "NDArray[Any] | None":
    """The tensor `name` of the checkpoint in `folder`, mapped; None: it has none of this name.

    Raises:
        CheckpointError: a file is damaged, or `folder` has no safetensors files.
        OSError: a file cannot be read.
    """
    for file in weight_files(folder):
        tensors = read_header(file)
        for stored in tensors:
            if renamed(stored, names.prefixes) == name:
                return MappedTensors(file, tensors).read(stored)
    return None
