"""Operations on single rows: gather, columns, scale, sums, gates, root-mean-square normalisation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that go to others: `count` from `first` on to those from `to` on."""

    first: int
    to: int
    count: int
    heads: int = 1
    """So many times, further on by `step` and `to_step`."""
    step: int = 0
    to_step: int = 0
    paired: bool = False
    """x0 y0 x1 y1 .. becomes x0 x1 .. y0 y1 .."""
