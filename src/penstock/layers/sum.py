"""The sum of parallel feed-forward parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Generic

from penstock.config.model_facts import ActivationSizes
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.layers.norm import Norm
from penstock.layers.spec import FeedForward, FeedForwardSpec, NormSpec

if TYPE_CHECKING:
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class Summand:
    """norm_after(part(norm(x)))."""

    part: FeedForwardSpec
    norm: NormSpec | None
    norm_after: NormSpec | None

    @property
    def norms(self) -> Iterator[NormSpec]:
        """The norms that the summand has."""
        yield from (norm for norm in (self.norm, self.norm_after) if norm is not None)


@dataclass(frozen=True, slots=True)
class SumSpec:
    """The sum of the outputs of several parts on the same input. See `FeedForwardSpec` for the methods."""

    hidden_size: int
    summands: tuple[Summand, ...]

    @property
    def activation_sizes(self) -> ActivationSizes:
        parts = [summand.part.activation_sizes for summand in self.summands]
        beside = 4 * self.hidden_size
        return ActivationSizes(
            sum(part.native for part in parts) + beside,
            sum(part.reference for part in parts) + beside,
            max(part.widest for part in parts),
        )

    @property
    def tp_divisor(self) -> int:
        return math.gcd(*(summand.part.tp_divisor for summand in self.summands))

    def shard(self, tp_size: int) -> SumSpec:
        return replace(
            self, summands=tuple(replace(summand, part=summand.part.shard(tp_size)) for summand in self.summands)
        )

    def build(self, factory: WeightFactory[A]) -> FeedForward[A]:
        return Sum(self, factory)


class Sum(Generic[A]):
    """See `SumSpec`, and `FeedForward`."""

    def __init__(self, spec: SumSpec, factory: WeightFactory[A]) -> None:
        self._summands = [_Summand(summand, factory) for summand in spec.summands]
        self._add = factory.ops.add_rows

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        first, *others = self._summands
        total = first(x, adapters)
        for summand in others:
            total = self._add(summand(x, adapters), total, 1.0)
        return total


class _Summand(Generic[A]):
    def __init__(self, spec: Summand, factory: WeightFactory[A]) -> None:
        self._norm = None if spec.norm is None else Norm(spec.norm, factory)
        self._norm_after = None if spec.norm_after is None else Norm(spec.norm_after, factory)
        self._part = spec.part.build(factory)

    def __call__(self, x: A, adapters: AdapterRows | None) -> A:
        made = self._part(x if self._norm is None else self._norm(x), adapters)
        return made if self._norm_after is None else self._norm_after(made)
