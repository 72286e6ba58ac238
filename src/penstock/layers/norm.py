"""Normalisation as a layer."""

from typing import Protocol

from torch import Tensor

from penstock.layers.spec import NormSpec
from penstock.quantization.base import WeightFactory


class Norm(Protocol):
    """Normalises the last axis of `x` [num_tokens, size]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def after_adding(self, x: Tensor, residual: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum of `factor * x` and `residual`); both arguments are given up."""
        ...

    def of_sum(self, x: Tensor, residual: Tensor, factor: float) -> Tensor:
        """The norm of the sum of `factor * x` and `residual`; both arguments are given up."""
        ...


def make_norm(spec: NormSpec, factory: WeightFactory) -> Norm:
    """The norm that `spec` describes, without content."""
    return LayerNorm(spec, factory) if spec.centred else RMSNorm(spec, factory)


class RMSNorm:
    """Normalises the last axis. weight [size]."""

    def __init__(self, spec: NormSpec, factory: WeightFactory) -> None:
        self.weight = factory.norm(spec.name, spec.size, spec.offset)
        self.eps = spec.eps
        self._ops = factory.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, residual: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum of `factor * x` and `residual`); both arguments are given up."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps, factor)

    def of_sum(self, x: Tensor, residual: Tensor, factor: float) -> Tensor:
        return self.after_adding(x, residual, factor)[0]


class LayerNorm:
    """Around the mean. weight [size], bias [size] or None. See `Norm`."""

    def __init__(self, spec: NormSpec, factory: WeightFactory) -> None:
        assert not spec.offset
        self.weight = factory.norm(spec.name, spec.size)
        self.bias = factory.tensor(f"{spec.name}.bias", spec.size) if spec.bias else None
        self.eps = spec.eps
        self._ops = factory.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self.weight, self.bias, self.eps)

    def after_adding(self, x: Tensor, residual: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return self._ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, factor)

    def of_sum(self, x: Tensor, residual: Tensor, factor: float) -> Tensor:
        return self._ops.norm_of_sum(x, residual, self.weight, self.bias, self.eps, factor)
