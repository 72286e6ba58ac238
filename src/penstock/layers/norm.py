"""The normalization layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import numpy as np

from penstock.kernels.array_types import A
from penstock.kernels.elementwise import NormWeight
from penstock.layers.spec import NormSpec

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


class Norm(Generic[A]):
    """RMS norm or layer norm of the last axis, by its `NormSpec`. weight [size], bias [size] or None."""

    def __init__(self, spec: NormSpec, factory: WeightFactory[A]) -> None:
        if spec.weighted:
            self.weight = factory.norm(spec.name, spec.size, spec.offset)
        else:
            self.weight = factory.constant(np.ones(spec.size, np.float32), factory.dtype)
        dtype = self.weight.dtype
        self.bias = factory.tensor(f"{spec.name}.bias", spec.size, dtype=dtype) if spec.bias else None
        if spec.centred and self.bias is None:
            self.bias = factory.constant(np.zeros(spec.size, np.float32), dtype)
        self.eps = spec.eps
        self._ops = factory.ops

    def __call__(self, x: A) -> A:
        return self._ops.rms_norm(x, self.weight, self.eps, bias=self.bias)

    def of_sum(
        self,
        x: A,
        residual: A,
        factor: float,
        *,
        after: Norm[A] | None = None,
        total: A | None = None,
    ) -> tuple[A, A]:
        """Returns (norm(sum), sum), where sum = total * (factor * after(x) + residual).

        May overwrite `x` and `residual`.
        """
        if after is not None and after.bias is not None:
            x, after = after(x), None
        scaled = None if after is None else NormWeight(after.weight, after.eps)
        return self._ops.add_rms_norm(
            x, residual, self.weight, self.eps, factor, bias=self.bias, after=scaled, total=total
        )
