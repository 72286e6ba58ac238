"""The sizes of weights, read off a build over a factory that records their shapes and allocates nothing. No torch."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from penstock.checkpoint.adapters.adaptable import AdaptableExperts
from penstock.config.ranks import ALONE, Ranks
from penstock.dataclass import dataclass
from penstock.quantization.base import Unquantized, WeightFactory
from penstock.quantization.rows import MapRows, Piece


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
    by_head: list[str] = field(default_factory=list)
    """The names of those of them that are used head by head."""
    embeddings: list[MatrixSize] = field(default_factory=list)
    """The embeddings that LoRA adapters can target."""
    experts: dict[str, AdaptableExperts] = field(default_factory=dict)
    """The experts that LoRA adapters can target, by the prefix of their names."""
    pair_rows: int = 0
    """Most rows of the updates of a token's experts at one time."""
    num_other_parameters: int = 0
    """Number of weight elements that are not in `matrices`: biases, norms."""
    num_repeated: int = 0
    """Number of elements of `matrices` that files lack, as they repeat others."""

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

    def __init__(self, ranks: Ranks = ALONE) -> None:
        super().__init__(Unquantized(), NOTHING, NOTHING, NOTHING)
        self.ranks, self.sizes = ranks, WeightSizes()

    def lora(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        columns: int,
        weight: object,
        *,
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
    ) -> None:
        for rows in self._named(names, sizes, pieces, whole):
            self.sizes.adaptable.append(MatrixSize(rows.name, rows.kept, columns))

    def expert_lora(
        self,
        experts: str,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        columns: int,
        weights: Sequence[object],
        *,
        top_k: int,
        interleaved: bool = False,
    ) -> None:
        prefix = f"{self._above}{experts}"
        maps = self._named(names, sizes)
        before = self.sizes.experts.get(prefix, AdaptableExperts(len(weights), {}, interleaved=interleaved))
        shapes = {name: (rows.kept, columns) for name, rows in zip(names, maps, strict=True)}
        self.sizes.experts[prefix] = replace(before, maps=before.maps | shapes)
        self.sizes.pair_rows = max(self.sizes.pair_rows, top_k * sum(rows.kept for rows in maps))

    def head_lora(self, name: str, num_heads: int, key_dim: int, value_dim: int, columns: int) -> None:
        rows = len(self.ranks.own(num_heads)) * (key_dim + value_dim)
        self.sizes.adaptable.append(MatrixSize(f"{self._above}{name}", rows, columns))
        self.sizes.by_head.append(f"{self._above}{name}")

    def lookup_table(self, name: str, rows: int, columns: int, num_ids: int | None = None) -> None:
        self.sizes.embeddings.append(MatrixSize(f"{self._above}{name}", rows, columns, multiplied=False))

    def embedding(self, name: str, rows: int, columns: int) -> Any:
        own = self._rows(name, (Piece(rows),))
        self.sizes.matrices.append(MatrixSize(own.name, own.kept, columns, multiplied=False))
        return NOTHING

    def whole_matrix(self, name: str, rows: int, columns: int, take: object) -> None:
        self.matrix(name, rows, columns)  # the other weights, to which `take` gives its rows, are not counted again

    def tensor(self, name: str, *shape: int, pieces: tuple[Piece, ...] | None = None, **_: object) -> Any:
        own = self._rows(name, pieces or (Piece(shape[0], whole=True),))
        self.sizes.num_other_parameters += own.kept * math.prod(shape[1:])
        return NOTHING

    def taps(
        self,
        name: str | tuple[str, ...],
        pieces: tuple[Piece, ...],
        kernel: int,
        factors: tuple[float, ...] | None = None,
    ) -> Any:
        return self.tensor(name if isinstance(name, str) else name[0], 0, kernel, pieces=pieces)

    def repeat_first_row(self, name: str, rows: int) -> None:
        (table,) = (matrix for matrix in self.sizes.matrices if matrix.name == f"{self._above}{name}")
        self.sizes.num_repeated += max(0, table.rows - rows) * table.columns

    def load_convolution(self, name: str, in_size: int, width: int) -> None:
        return

    def reshape(self, name: str, shape: tuple[int, ...]) -> None:
        return

    def derived_tensor(self, *_: object, **__: object) -> Any:
        return NOTHING

    def empty(self, *shape: int, dtype: object = None) -> Any:
        return NOTHING

    def constant(self, values: object, dtype: object = None) -> Any:
        return NOTHING

    def _new_weight(self, maps: Sequence[MapRows], columns: int, *_: object, **__: object) -> Any:
        self.sizes.matrices += [MatrixSize(rows.name, rows.kept, columns) for rows in maps]
        return NOTHING

    def _fill_bias(self, maps: Sequence[MapRows], bias: object, biased: tuple[bool, ...] | None = None) -> None:
        kept = [rows.kept for rows in maps]
        self.sizes.num_other_parameters += sum(kept if biased is None else itertools.compress(kept, biased))
