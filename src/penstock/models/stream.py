"""The residual stream between the parts of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.layers.norm import Norm

if TYPE_CHECKING:
    from penstock.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Stream(Generic[A]):
    """The residual stream as an unfinished sum, total * (residual + after(x)), which is fused with the next norm.

    Without a residual, `x` is the stream itself.
    """

    x: A
    """[num_tokens, hidden_size]"""
    residual: A | None = None
    after: Norm[A] | None = None
    """None: no norm after the part."""
    total: A | None = None
    """[1] float32; None: 1."""


class Residual(Generic[A]):
    """Adds the outputs of a model's parts to the residual stream, scaled by `residual_multiplier`."""

    def __init__(self, factor: float, ops: Ops[A]) -> None:
        self._factor, self._ops = factor, ops

    def normed(self, stream: Stream[A], norm: Norm[A] | None) -> tuple[A, A]:
        """Returns (norm(stream), stream), both [num_tokens, hidden_size]; may overwrite the stream's tensors."""
        if norm is None or stream.residual is None:
            total = self.added(stream)
            return (total if norm is None else norm(total)), total
        return norm.of_sum(stream.x, stream.residual, self._factor, after=stream.after, total=stream.total)

    def added(self, stream: Stream[A]) -> A:
        """The stream as one tensor [num_tokens, hidden_size]; may overwrite the stream's tensors."""
        if stream.residual is None:
            return stream.x
        x = stream.x if stream.after is None else stream.after(stream.x)
        return self._ops.add_rows(x, stream.residual, self._factor, total=stream.total)
