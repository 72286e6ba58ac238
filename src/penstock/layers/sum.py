"""The sum of parallel feed-forward parts."""

from torch import Tensor

from penstock.kernels.lora.rows import AdapterRows
from penstock.layers.norm import Norm
from penstock.layers.sum_spec import Summand, SumSpec
from penstock.quantization.base import WeightFactory


class Sum:
    """See `SumSpec`, and `FeedForward`."""

    def __init__(self, spec: SumSpec, factory: WeightFactory) -> None:
        self._summands = [_Summand(summand, factory) for summand in spec.summands]
        self._add = factory.ops.add_rows

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        first, *others = self._summands
        total = first(x, adapters)
        for summand in others:
            total = self._add(summand(x, adapters), total, 1.0)
        return total


class _Summand:
    def __init__(self, spec: Summand, factory: WeightFactory) -> None:
        self._norm = None if spec.norm is None else Norm(spec.norm, factory)
        self._norm_after = None if spec.norm_after is None else Norm(spec.norm_after, factory)
        self._part = spec.part.build(factory)

    def __call__(self, x: Tensor, adapters: AdapterRows | None) -> Tensor:
        made = self._part(x if self._norm is None else self._norm(x), adapters)
        return made if self._norm_after is None else self._norm_after(made)
