"""The sizes of weights, read off a build over a factory that records their shapes and allocates nothing. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config.ranks import ALONE, Ranks
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory
else:
    WeightFactory = object  # mypy holds the recorder to its signatures; a base class of today would need torch

Names = tuple[str, ...]
Sizes = tuple[int, ...]
Pieces = tuple[tuple[Piece, ...], ...] | None


class MatrixSize(NamedTuple):
    """A matrix of the checkpoint, and the shape of a rank's shard of it."""

    name: str
    """Name in the checkpoint, without `.weight`."""
    rows: int
    columns: int
    multiplied: bool = True
    """Whether it is multiplied; False for a table whose rows are only looked up."""


@dataclass(slots=True)
class WeightSizes:
    """The weights of one rank."""

    matrices: list[MatrixSize] = field(default_factory=list)
    adaptable: list[MatrixSize] = field(default_factory=list)
    """The matrices that LoRA adapters can target."""
    num_other_parameters: int = 0
    """Number of weight elements that are not in `matrices`: biases, norms."""

    @property
    def num_parameters(self) -> int:
        """Number of elements of all weights; a tied embedding counts once."""
        return sum(matrix.rows * matrix.columns for matrix in self.matrices) + self.num_other_parameters


class _Nothing:
    """Stands for each tensor, weight and operation: its attributes, items and results are itself, too."""

    def __getattr__(self, name: str) -> "_Nothing":
        return self

    def __call__(self, *args: object, **kwargs: object) -> "_Nothing":
        return self

    def __getitem__(self, index: object) -> "_Nothing":
        return self

    __iter__ = None  # a loop over it is an error, not endless


NOTHING: Any = _Nothing()


class SizeRecorder(WeightFactory):
    """A factory that records the sizes of the weights that a rank would have. See `WeightFactory` for the methods."""

    def __init__(self, ranks: Ranks = ALONE, sizes: WeightSizes | None = None, above: str = "") -> None:
        """
        Args:
            sizes: where to record; None: a new record.
            above: prefix of all names.
        """
        self.ranks, self.sizes, self._above = ranks, sizes or WeightSizes(), above

    def __getattr__(self, name: str) -> Any:
        return NOTHING  # all else is an operation, or makes what other calls record

    def at(self, name: str) -> "SizeRecorder":
        return SizeRecorder(self.ranks, self.sizes, f"{self._above}{name}.")

    def precise(self, *, least_bits: int = 0) -> "SizeRecorder":
        return self

    def linear(
        self, names: Names, sizes: Sizes, columns: int, *, pieces: Pieces = None, whole: bool = False, **_: object
    ) -> Any:
        self.sizes.matrices.extend(self._shapes(names, sizes, columns, pieces, whole=whole))
        return NOTHING

    def lora(self, names: Names, sizes: Sizes, columns: int, *, pieces: Pieces = None, whole: bool = False) -> None:
        self.sizes.adaptable.extend(self._shapes(names, sizes, columns, pieces, whole=whole))

    def matrix(self, name: str, rows: int, columns: int) -> Any:
        return self.linear((name,), (rows,), columns)

    def embedding(self, name: str, rows: int, columns: int) -> Any:
        self.sizes.matrices.append(MatrixSize(self._above + name, len(self.ranks.own(rows)), columns, multiplied=False))
        return NOTHING

    def whole_matrix(self, name: str, rows: int, columns: int, take: object) -> None:
        self.matrix(name, rows, columns)  # whose rows `weight_of` divides among other weights

    def bias(self, names: Names, sizes: Sizes, dtype: object, *, pieces: Pieces = None, whole: bool = False) -> Any:
        self.sizes.num_other_parameters += sum(one.rows for one in self._shapes(names, sizes, 1, pieces, whole=whole))
        return NOTHING

    def fill_bias(self, names: Names, sizes: Sizes, bias: object) -> None:
        self.bias(names, sizes, None)

    def tensor(self, name: str, *shape: int, pieces: tuple[Piece, ...] | None = None, **_: object) -> Any:
        rows = shape[0] if pieces is None else self._own(pieces)
        self.sizes.num_other_parameters += math.prod((rows, *shape[1:]))
        return NOTHING

    def norm(self, name: str, size: int, offset: float = 0.0) -> Any:
        return self.tensor(name, size)

    def float32(self, name: str, *pieces: Piece | int, factor: float = 1.0) -> Any:
        return self.tensor(name, 0, pieces=tuple(one if isinstance(one, Piece) else Piece(one) for one in pieces))

    def taps(self, name: str, pieces: tuple[Piece, ...], kernel: int) -> Any:
        return self.tensor(name, 0, kernel, pieces=pieces)

    def _own(self, pieces: tuple[Piece, ...]) -> int:
        """Number of rows that the rank has of these pieces."""
        return sum(rows if whole else len(self.ranks.own(rows)) for rows, whole in pieces)

    def _shapes(self, names: Names, sizes: Sizes, columns: int, pieces: Pieces, *, whole: bool) -> Iterator[MatrixSize]:
        """The matrices of `WeightFactory.linear`."""
        if pieces is None:
            each = tuple(Piece(size, whole) for size in sizes)
            pieces = tuple((piece,) for piece in each) if len(names) > 1 else (each,)
        for name, of_one in zip(names, pieces, strict=True):
            yield MatrixSize(self._above + name, self._own(of_one), columns)
