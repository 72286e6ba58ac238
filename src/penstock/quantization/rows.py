"""Rows of a checkpoint's tensors: reordered, or the part that a rank keeps."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from penstock.kernels.linear.quantized import Quantized
from penstock.ranks import Ranks
from penstock.weight_formats import WeightFormat

if TYPE_CHECKING:
    from penstock.quantization.base import Parameter


class RowRun(NamedTuple):
    """Neighbouring rows of a matrix, from `given` on in the checkpoint, which come to `first` and on."""

    given: int
    first: int
    rows: int


class Piece(NamedTuple):
    """Neighbouring rows of a matrix that are divided among the ranks for themselves: the queries of q, k and v."""

    rows: int
    whole: bool = False
    """Every rank has all of them."""


class MapRows(NamedTuple):
    """A matrix of the checkpoint, and which of its rows are kept."""

    name: str
    num_rows: int
    """In the checkpoint."""
    runs: tuple[RowRun, ...]
    """Those that are kept, in the checkpoint's order."""

    @property
    def kept(self) -> int:
        return sum(run.rows for run in self.runs)


def own_runs(ranks: Ranks, pieces: Sequence[Piece]) -> tuple[RowRun, ...]:
    """The rows that a rank keeps of a matrix that is made of these pieces: its own of each, one after another."""
    if ranks.size == 1:
        return (RowRun(0, 0, sum(piece.rows for piece in pieces)),)
    runs, given, first = [], 0, 0
    for rows, whole in pieces:
        own = range(rows) if whole else ranks.own(rows)
        runs.append(RowRun(given + own.start, first, len(own)))
        given, first = given + rows, first + len(own)
    return tuple(runs)


def _met(runs: Sequence[RowRun], first: int, count: int) -> Iterator[tuple[int, slice]]:
    """Of rows from `first` on in the checkpoint: where each run of them comes to, and which of them it is."""
    for run in runs:
        begin, end = max(first, run.given), min(first + count, run.given + run.rows)
        if begin < end:
            yield run.first + begin - run.given, slice(begin - first, end - first)


class PickedRows:
    """Takes the rows of a tensor in another order than `parameter` has them, or only some."""

    def __init__(self, parameter: "Parameter", runs: Sequence[RowRun], count: int | None = None) -> None:
        """
        Args:
            runs: in the checkpoint's order.
            count: rows of the checkpoint's tensor; None: the runs are all of them.
        """
        rows, *rest = parameter.shape
        self.shape: tuple[int, ...] = (rows if count is None else count, *rest)
        self._parameter, self._runs = parameter, runs

    def load(self, first: int, rows: Tensor) -> None:
        for place, part in _met(self._runs, first, len(rows)):
            self._parameter.load(place, rows[part])


class Fillable(Protocol):
    """A weight, as those see it who fill it."""

    rows: int
    columns: int
    format: WeightFormat

    def load(self, first: int, rows: Tensor | Quantized) -> None:
        """As `Weight.load`."""
        ...


class OwnRows:
    """A matrix of the checkpoint, of whose rows a weight has some: those of a rank. See `Fillable`."""

    def __init__(self, weight: Fillable, first: int, given: MapRows) -> None:
        """
        Args:
            first: the row of the weight that the matrix begins with.
        """
        self.rows, self.columns, self.format = given.num_rows, weight.columns, weight.format
        self._weight, self._first, self._runs = weight, first, given.runs

    def load(self, first: int, rows: Tensor | Quantized) -> None:
        count = len(rows.values) if isinstance(rows, Quantized) else len(rows)
        for place, part in _met(self._runs, first, count):
            self._weight.load(self._first + place, rows[part])
