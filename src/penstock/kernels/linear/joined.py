"""Linear maps of one input that are kept in different formats, as one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.elementwise.reference import Activation
from penstock.kernels.linear.weight import Weight
from penstock.native.program import empty_rows


class JoinedWeight:
    """Weights whose outputs lie beside each other; or, `gated`, two of them: activation(first(x)) * second(x).

    See `LinearMap` for the methods.
    """

    def __init__(self, parts: Sequence[Weight], *, gated: bool) -> None:
        assert not gated or len(parts) == 2
        self.parts, self.gated = parts, gated
        self.bias_dtype = parts[0].bias_dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def linear(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, activation: Activation = "silu") -> Tensor:
        rows = [part.rows for part in self.parts]
        out = empty_rows(x, (rows[0] if self.gated else sum(rows),), dtype)
        for index, part in enumerate(self.parts):
            first = sum(rows[:index])
            part_bias = None if bias is None else bias[first : first + part.rows]
            if self.gated:
                part.linear_into(out, 0, x, part_bias, after_gate=index == 1, activation=activation)
            else:
                part.linear_into(out, first, x, part_bias)
        return out
