"""Linear layers whose inputs and outputs are limited to ranges that the checkpoint has (Gemma 4's vision tower)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from penstock.kernels.array_types import A
from penstock.kernels.elementwise import Columns

if TYPE_CHECKING:
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.quantization.base import WeightFactory


class ClippedLinear(Generic[A]):
    """One or several linear layers of the same input, each with limits of its own; the outputs side by side.

    Names end with `.linear`; the limits are beside it: `input_min`, `input_max`, `output_min` and `output_max`.
    """

    def __init__(
        self, names: tuple[str, ...], in_size: int, out_sizes: tuple[int, ...], factory: WeightFactory[A]
    ) -> None:
        self._ops, self._dtype, self._sizes = factory.ops, factory.dtype, out_sizes
        self._weights = [factory.matrix(name, size, in_size) for name, size in zip(names, out_sizes, strict=True)]
        self._inputs, self._outputs = (
            [_Limits(name.removesuffix("linear") + side, factory) for name in names] for side in ("input", "output")
        )

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        """`x` [num_tokens, in_size] -> [num_tokens, sum(out_sizes)]."""
        ops, first = self._ops, 0
        out = ops.empty_rows(x, (sum(self._sizes),), self._dtype)
        for weight, size, before, after in zip(self._weights, self._sizes, self._inputs, self._outputs, strict=True):
            taken = ops.empty_rows(x, (x.shape[1],), x.dtype)
            ops.copy_columns(x, taken, Columns(0, 0, x.shape[1]))
            before.apply(taken, 0, x.shape[1])
            weight.linear_into(out, first, taken, None)
            after.apply(out, first, size)
            first += size
        return out


class _Limits(Generic[A]):
    """The least and the largest value of an input or an output."""

    def __init__(self, name: str, factory: WeightFactory[A]) -> None:
        self._low, self._high = (factory.float32(f"{name}_{end}", 1) for end in ("min", "max"))
        self._limit = factory.ops.limit

    def apply(self, x: A, first: int, count: int) -> None:
        """Limit `count` columns of `x` from `first` on."""
        self._limit(x, first, count, self._low, self._high)
