"""RMS normalisation as a layer."""

from torch import Tensor

from penstock.layers.spec import NormSpec
from penstock.quantization.base import WeightFactory


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
