"""Reads weights from safetensors files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.loading.loader import OpenWeights
from penstock.models.loading.stored_head import renamed

_MAX_HEADER_BYTES = 32 * 2**20
_PIECE_ELEMENTS = 2**22
"""Elements of two tensors that are compared at a time."""
_LFS_POINTER = b"version https://git-lfs"


class SafetensorsFile:
    """A safetensors file of weights."""

    def __init__(self, path: Path, prefixes: Sequence[tuple[str, str]] = ()) -> None:
        """
        Args:
            prefixes: see `ModelNames`.

        Raises:
            CheckpointError: the file is damaged or truncated.
        """
        self.path = path
        with _opened(path) as tensors:
            names: list[str] = tensors.keys()
            self._stored: dict[str, str] = {}
            for name in names:
                other = self._stored.setdefault(renamed(name, prefixes), name)
                if other != name and not _are_equal(tensors, other, name):
                    raise CheckpointError(
                        f"{path} holds {other} and {name}, which are the same tensor of the model, and differ"
                    )
            self.shapes: Mapping[str, tuple[int, ...]] = {
                name: tuple(tensors.get_slice(stored).get_shape()) or (1,) for name, stored in self._stored.items()
            }

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        with _opened(self.path) as tensors:
            yield _Slices(tensors, self._stored)


def _are_equal(tensors: Any, name: str, other: str) -> bool:
    a, b = tensors.get_slice(name), tensors.get_slice(other)
    shape = a.get_shape()
    if shape != b.get_shape() or a.get_dtype() != b.get_dtype():
        return False
    if not shape:
        return bool(tensors.get_tensor(name) == tensors.get_tensor(other))
    step = max(1, _PIECE_ELEMENTS // max(1, math.prod(shape[1:])))
    return all(torch.equal(a[at : at + step], b[at : at + step]) for at in range(0, shape[0], step))


class _Slices:
    def __init__(self, tensors: Any, stored: Mapping[str, str]) -> None:
        self._tensors, self._stored = tensors, stored

    def read(self, name: str, first: int, last: int) -> Tensor:
        try:
            stored = self._stored[name]
            part = self._tensors.get_slice(stored)
            rows: Tensor = part[first:last] if part.get_shape() else self._tensors.get_tensor(stored).view(1)
        except SafetensorError as error:  # for example a dtype that torch lacks
            raise CheckpointError(f"cannot be read: {error}") from error
        return rows


def _opened(file: Path) -> Any:
    """
    Raises:
        CheckpointError: the header exceeds the limit (parsing takes several times its size in memory), or is damaged.
    """
    try:
        with file.open("rb") as opened:
            beginning = opened.read(len(_LFS_POINTER))
        if beginning == _LFS_POINTER:
            raise CheckpointError(f"{file} is a Git LFS pointer instead of the weights; fetch them with `git lfs pull`")
        header_bytes = int.from_bytes(beginning[:8], "little")
        if _MAX_HEADER_BYTES < header_bytes < file.stat().st_size:
            raise CheckpointError(
                f"{file} has a header of {header_bytes} bytes; the limit is {_MAX_HEADER_BYTES}, enough for 200,000 "
                "tensors"
            )
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or truncated: {error}") from error
