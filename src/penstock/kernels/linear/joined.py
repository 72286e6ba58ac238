"""Joins linear layers of the same input whose weights have different formats."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, cast

from penstock.config.feed_forward import Activation
from penstock.kernels.array_types import A
from penstock.kernels.linear.weight import LinearMap, Weight
from penstock.kernels.lora import LoraUpdate
from penstock.native.array import AnyDtype


class JoinedWeight(Generic[A]):
    """Weights whose outputs are concatenated; or, with a `gate`, two weights: gate(first(x)) * second(x).

    See `LinearMap` for the methods.
    """

    def __init__(
        self,
        parts: Sequence[Weight[A]],
        gate: Activation | None,
        empty_rows: Callable[[A, tuple[int, ...], AnyDtype], A],
    ) -> None:
        """`empty_rows`: see `Ops.empty_rows`."""
        assert gate is None or len(parts) == 2
        self.parts, self.gate, self._empty_rows = parts, gate, empty_rows
        self.bias_dtype = parts[0].bias_dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def linear(self, x: A, bias: A | None, dtype: AnyDtype, update: LoraUpdate[A] | None = None) -> A:
        rows = [part.rows for part in self.parts]
        out = self._empty_rows(x, (sum(rows) if self.gate is None else rows[0],), dtype)
        for index, part in enumerate(self.parts):
            first = sum(rows[:index])
            part_bias = None if bias is None else bias[first : first + part.rows]
            added = None if update is None else replace(update, first=update.first + first)
            if self.gate is None:
                part.linear_into(out, first, x, part_bias, update=added)
            else:
                part.linear_into(out, 0, x, part_bias, after_gate=self.gate if index else None, update=added)
        return out


def weight_of_row(linear_map: LinearMap[A], row: int) -> tuple[Weight[A], int]:
    """The weight that has a row of a linear map, and the row's place in it."""
    if not isinstance(linear_map, JoinedWeight):
        return cast("Weight[A]", linear_map), row
    for part in linear_map.parts:
        if row < part.rows:
            return part, row
        row -= part.rows
    raise AssertionError(f"a joined weight has {sum(part.rows for part in linear_map.parts)} rows")
