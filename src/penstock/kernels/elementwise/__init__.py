"""Operations on single rows: gather, columns, scale, sums, gates, normalisation."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.feed_forward import Activation


class RMSNormOp(Protocol):
    """Root-mean-square normalisation."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None, groups: int = 1) -> Tensor:
        """`x` [rows, groups * size] over the root mean square of each `size` columns, times `weight` [size].

        The weight is of the type of `x`, or float32: nothing is rounded before it is applied then. With a `bias`
        [size], of the weight's type, the mean is taken off first, and the bias added in the end.
        """
        ...


class AddRMSNormOp(Protocol):
    """The residual sum, and its norm."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        factor: float,
        *,
        bias: Tensor | None = None,
        after: "NormWeight | None" = None,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum of `factor * x` and `residual`): `weight`, `eps` and `bias` as `rms_norm` takes them.

        `x` and `residual` [rows, size] are given up: the results may lie where they were. `x` is normalised by `after`
        first, where that is given, and the sum multiplied by `total` [1] float32.
        """
        ...


class AddRowsOp(Protocol):
    """The residual sum."""

    def __call__(self, x: Tensor, residual: Tensor, factor: float, *, total: Tensor | None = None) -> Tensor:
        """`total` (or 1) times the sum of `factor * x` and `residual` [rows, size], which is given up."""
        ...


class GateOp(Protocol):
    """Rows times others, after their activation."""

    def __call__(self, x: Tensor, others: Tensor, first: int, activation: Activation) -> Tensor:
        """activation(`x`) times the columns of `others` from `first` on; `x` [rows, size] is given up."""
        ...


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A norm, as operations take it."""

    weight: Tensor
    """[size], of the type of the activations or float32."""
    eps: float


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
