"""The spec of a sum of parallel feed-forward parts: plain data, no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.model_facts import Working
from penstock.layers.spec import FeedForward, FeedForwardSpec, MatrixSize, NormSpec

if TYPE_CHECKING:
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
    def working(self) -> Working:
        parts = [summand.part.working for summand in self.summands]
        beside = 4 * self.hidden_size
        return Working(
            sum(part.native for part in parts) + beside,
            sum(part.reference for part in parts) + beside,
            max(part.widest for part in parts),
        )

    @property
    def num_other_parameters(self) -> int:
        norms = sum(norm.num_parameters for summand in self.summands for norm in summand.norms)
        return norms + sum(summand.part.num_other_parameters for summand in self.summands)

    @property
    def divided_by(self) -> int:
        return math.gcd(*(summand.part.divided_by for summand in self.summands))

    def share(self, ranks: int) -> "SumSpec":
        return replace(
            self, summands=tuple(replace(summand, part=summand.part.share(ranks)) for summand in self.summands)
        )

    def matrices(self) -> Iterator[MatrixSize]:
        for summand in self.summands:
            yield from summand.part.matrices()

    def build(self, factory: "WeightFactory") -> FeedForward:
        from penstock.layers.sum import Sum  # not above: specs are read before torch

        return Sum(self, factory)
