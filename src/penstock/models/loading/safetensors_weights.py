"""Reads weights from safetensors files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.safetensors import MappedTensors, read_header
from penstock.errors import CheckpointError
from penstock.models.loading.loader import OpenWeights
from penstock.models.loading.stored_head import renamed

_PIECE_BYTES = 2**24
"""Bytes of two tensors that are compared at a time."""


class SafetensorsFile:
    """A safetensors file of weights."""

    def __init__(self, path: Path, prefixes: Sequence[tuple[str, str]] = ()) -> None:
        """
        Args:
            prefixes: see `ModelNames`.

        Raises:
            CheckpointError: the file is damaged or truncated.
        """
        self.path, self._header = path, read_header(path)
        self._stored: dict[str, str] = {}
        for name in self._header:
            other = self._stored.setdefault(renamed(name, prefixes), name)
            # Some checkpoints have a tensor under two names, tied: equal ones are harmless.
            if other != name and not self._are_equal(other, name):
                raise CheckpointError(
                    f"{path} holds {other} and {name}, which are the same tensor of the model, and differ"
                )
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: self._header[stored].shape or (1,) for name, stored in self._stored.items()
        }

    def _are_equal(self, name: str, other: str) -> bool:
        first, second = self._header[name], self._header[other]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        mapped = MappedTensors(self.path, self._header)
        a, b = mapped.bytes_of(name), mapped.bytes_of(other)
        return all(
            np.array_equal(a[at : at + _PIECE_BYTES], b[at : at + _PIECE_BYTES])
            for at in range(0, len(a), _PIECE_BYTES)
        )

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        yield _Mapped(MappedTensors(self.path, self._header), self._stored)


class _Mapped:
    def __init__(self, tensors: MappedTensors, stored: Mapping[str, str]) -> None:
        self._tensors, self._stored = tensors, stored

    def read(self, name: str, first: int, last: int) -> NDArray[Any]:
        return self._tensors.read(self._stored[name], first, last)
