"""Row-wise operations: gather and scatter, column copies, scaling, activations, sums, gates, normalization."""

from __future__ import annotations

from typing import Generic, Literal, Protocol

from penstock.checkpoint.encoder_config import HeadActivation
from penstock.config.feed_forward import Activation
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A


class RMSNormOp(Protocol[A]):
    """RMS norm, or layer norm."""

    def __call__(self, x: A, weight: A, eps: float, *, bias: A | None = None, groups: int = 1) -> A:
        """Divide each group of `size` columns of `x` [rows, groups * size] by its root mean square, times `weight`.

        Args:
            weight: [size], in the dtype of `x`, or float32; with float32 nothing is rounded before it is applied.
            bias: [size], in the weight's dtype; makes this a layer norm: the mean is subtracted first, and the bias is
                added at the end.
        """
        ...


class AddRMSNormOp(Protocol[A]):
    """The residual sum and its norm, fused."""

    def __call__(
        self,
        x: A,
        residual: A,
        weight: A,
        eps: float,
        factor: float,
        *,
        bias: A | None = None,
        after: NormWeight[A] | None = None,
        total: A | None = None,
    ) -> tuple[A, A]:
        """Returns (norm(sum), sum), where sum = total * (factor * after(x) + residual).

        `x` and `residual` [rows, size] may be overwritten by the results.

        Args:
            weight, eps, bias: of the norm; see `RMSNormOp`.
            after: norm of `x` before it is added; None: no norm.
            total: [1] float32; None: 1.
        """
        ...


ElementActivation = HeadActivation | Literal["clip", "xielu"]
"""clip: to -1 to 1. xielu: Huang and Schlag, 2024, arXiv:2411.13010, with beta 0.5."""


class ActivateOp(Protocol[A]):
    """An activation of each element, or, between a division and a product, a soft cap (tanh) or a limit (clip)."""

    def __call__(
        self,
        x: A,
        activation: ElementActivation | None,
        *,
        divisor: float = 1.0,
        factor: float = 1.0,
        alphas: tuple[A, A] | None = None,
    ) -> A:
        """factor * activation(x / divisor) for `x` [rows, columns], which is overwritten; rounded once.

        `activation` None: none. gelu is the exact one.

        Args:
            alphas: of xielu, for values above and below 0, before their softplus: each [1] float32.
        """
        ...


class AddRowsOp(Protocol[A]):
    """The residual sum."""

    def __call__(self, x: A, residual: A, factor: float, *, total: A | None = None) -> A:
        """total * (factor * x + residual), all [rows, size]; may overwrite `residual`. `total` None: 1."""
        ...


class GateOp(Protocol[A]):
    """An activation times another tensor."""

    def __call__(self, x: A, others: A, first: int, activation: Activation) -> A:
        """activation(x) * others[:, first : first + size] for `x` [rows, size], which may be overwritten."""
        ...


class MixStreamsOp(Protocol[A]):
    """Weighted sums of a token's streams."""

    def __call__(self, x: A, factors: A, inputs: int, outputs: int, size: int, *, scale: A | None = None) -> A:
        """out[o] = scale * sum over i of factors[o, i] * x[i], for each row: [rows, outputs * size].

        Args:
            x: [rows, inputs * size, or more].
            factors: [rows, outputs * inputs, or more] float32.
            scale: [size] float32; None: 1.
        """
        ...


@dataclass(frozen=True, slots=True)
class NormWeight(Generic[A]):
    """The weight and epsilon of an RMS norm."""

    weight: A
    """[size], in the activations' dtype or float32."""
    eps: float


@dataclass(frozen=True, slots=True)
class Columns:
    """A strided copy of columns: for each head, `count` columns from `first` on to the columns from `to` on."""

    first: int
    to: int
    count: int
    heads: int = 1
    """Number of repetitions, each offset by `step` in the source and `to_step` in the target."""
    step: int = 0
    to_step: int = 0
    paired: bool = False
    """Deinterleave: x0 y0 x1 y1 .. becomes x0 x1 .. y0 y1 .."""
