"""Selects and reorders rows of checkpoint tensors on loading, such as the shard of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.config.ranks import Ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.config.weight_formats import WeightFormat
    from penstock.kernels.linear.quantized import Quantized


class RowRun(NamedTuple):
    """Consecutive rows: row `given` of the checkpoint's matrix goes to row `first` of the weight, and so on."""

    given: int
    first: int
    rows: int


class Piece(NamedTuple):
    """Consecutive rows of a matrix that are sharded separately, such as the queries in a fused QKV matrix."""

    rows: int
    whole: bool = False
    """Whether every rank has all of the rows."""


class MapRows(NamedTuple):
    """A matrix of the checkpoint, and the rows that this rank has."""

    name: str
    num_rows: int
    """Rows in the checkpoint."""
    runs: tuple[RowRun, ...]
    """The rank's rows, in the checkpoint's order."""

    @property
    def kept(self) -> int:
        return sum(run.rows for run in self.runs)


def own_runs(ranks: Ranks, pieces: Sequence[Piece]) -> tuple[RowRun, ...]:
    """The rows of a rank's shard of a matrix that consists of these pieces: its rows of each piece, concatenated."""
    if ranks.size == 1:
        return (RowRun(0, 0, sum(piece.rows for piece in pieces)),)
    runs, given, first = [], 0, 0
    for rows, whole in pieces:
        own = range(rows) if whole else ranks.own(rows)
        runs.append(RowRun(given + own.start, first, len(own)))
        given, first = given + rows, first + len(own)
    return tuple(runs)


def _met(runs: Sequence[RowRun], first: int, count: int) -> Iterator[tuple[int, slice]]:
    """The overlap of `count` checkpoint rows from `first` on with each run: (target row, slice of these rows)."""
    for run in runs:
        begin, end = max(first, run.given), min(first + count, run.given + run.rows)
        if begin < end:
            yield run.first + begin - run.given, slice(begin - first, end - first)


class Parameter(Protocol):
    """The destination of one checkpoint tensor."""

    shape: tuple[int, ...]
    """The tensor's required shape in the checkpoint."""

    def load(self, first: int, rows: NDArray[Any]) -> None:
        """Load the tensor's rows from `first` on. Each row is loaded once, in any order.

        Raises:
            CheckpointError: the rows are invalid; the caller puts the tensor's name before the message.
        """
        ...


class PickedRows:
    """Loads the rows of a tensor into `parameter` in another order, or only some of them."""

    def __init__(self, parameter: Parameter, runs: Sequence[RowRun], count: int | None = None) -> None:
        """
        Args:
            runs: the selected rows, in the checkpoint's order.
            count: number of rows of the checkpoint's tensor; None: the runs cover all of them.
        """
        rows, *rest = parameter.shape
        self.shape: tuple[int, ...] = (rows if count is None else count, *rest)
        self._parameter, self._runs = parameter, runs

    def load(self, first: int, rows: NDArray[Any]) -> None:
        for place, part in _met(self._runs, first, len(rows)):
            self._parameter.load(place, rows[part])


class RowFactors:
    """A checkpoint's vector of factors on the rows of other tensors. See `Parameter`."""

    def __init__(self, count: int) -> None:
        self.shape: tuple[int, ...] = (count,)
        self._values, self._missing = np.empty(count, np.float32), count
        self._waiting: list[Callable[[NDArray[np.float32]], None]] = []

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self._values[first : first + len(rows)] = rows
        self._missing -= len(rows)
        while not self._missing and self._waiting:
            self._waiting.pop()(self._values)

    def when_loaded(self, take: Callable[[NDArray[np.float32]], None]) -> None:
        """Pass the factors to `take`, at once or when all are loaded."""
        if self._missing:
            self._waiting.append(take)
        else:
            take(self._values)


class ScaledRows:
    """Loads the rows of a floating-point tensor into `parameter`, each times its factor. See `Parameter`.

    Rows wait in memory until the factors are loaded.
    """

    def __init__(self, parameter: Parameter, factors: RowFactors) -> None:
        self.shape: tuple[int, ...] = parameter.shape
        self._parameter, self._factors = parameter, factors

    def load(self, first: int, rows: NDArray[Any]) -> None:
        rows = rows.copy()  # the file may be unmapped before the factors are loaded

        def scale(factors: NDArray[np.float32]) -> None:
            own = factors[first : first + len(rows)].reshape(-1, *[1] * (rows.ndim - 1))
            self._parameter.load(first, (rows.astype(np.float32) * own).astype(rows.dtype))

        self._factors.when_loaded(scale)


class Fillable(Protocol):
    """The part of a weight's interface that loading needs."""

    rows: int
    columns: int
    format: WeightFormat

    def load(self, first: int, rows: NDArray[Any] | Quantized) -> None:
        """See `Weight.load`."""
        ...


class OwnRows:
    """A full checkpoint matrix that loads only this rank's rows into a weight. See `Fillable`."""

    def __init__(self, weight: Fillable, first: int, given: MapRows) -> None:
        """
        Args:
            first: the matrix's first row in the weight.
        """
        self.rows, self.columns, self.format = given.num_rows, weight.columns, weight.format
        self._weight, self._first, self._runs = weight, first, given.runs

    def load(self, first: int, rows: NDArray[Any] | Quantized) -> None:
        for place, part in _met(self._runs, first, len(rows)):
            self._weight.load(self._first + place, rows[part])
