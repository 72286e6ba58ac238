"""Presents matrices that a checkpoint stores transposed, [in, out], as [out, in]."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.loading.loader import OpenWeights, WeightFile


class TransposedFile:
    """A weight file in which the matrices whose whole name matches a pattern appear transposed."""

    def __init__(self, file: WeightFile, pattern: str) -> None:
        self.path, self._file = file.path, file
        known = re.compile(pattern)
        self._rows = {name: shape[0] for name, shape in file.shapes.items() if known.fullmatch(name)}
        """Rows of these matrices in the file."""
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(reversed(shape)) if name in self._rows else shape for name, shape in file.shapes.items()
        }

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        with self._file.open() as weights:
            yield _Transposed(weights, self._rows)


class _Transposed:
    def __init__(self, weights: OpenWeights, rows: Mapping[str, int]) -> None:
        self._weights, self._rows = weights, rows

    def read(self, name: str, first: int, last: int) -> NDArray[Any]:
        if name not in self._rows:
            return self._weights.read(name, first, last)
        whole = self._weights.read(name, 0, self._rows[name])
        return np.ascontiguousarray(whole[:, first:last].T)
