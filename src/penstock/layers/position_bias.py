"""A bias on the scores of attention, by the distance of key and query: learned, or linear (ALiBi).

Learned ones share buckets, as in T5 (Raffel et al., 2020, arXiv:1910.10683): half of the buckets are for keys after the
query. Of each half the first half is for single distances, the others for ranges that grow with the logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.attention import BIAS_MARGIN
from penstock.layers.portable_math import power

if TYPE_CHECKING:
    from penstock.quantization.base import WeightFactory


@dataclass(frozen=True, slots=True)
class PositionBiasSpec:
    """The table of a model's position bias, which all of its layers share."""

    name: str
    """In the checkpoint, without `.weight`."""
    num_heads: int
    num_buckets: int = 32
    max_distance: int = 128
    """From this distance on, all are in the last bucket."""


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """Attention with linear biases (Press et al., 2022, arXiv:2108.12409): minus the distance times a head's slope."""

    num_heads: int
    steepness: float = 8.0
    """The slopes of a power of two of heads fall from 2 ** (-steepness / heads) to 2 ** -steepness."""

    @property
    def slopes(self) -> NDArray[np.float64]:
        """[num_heads]: those of the largest power of two of heads; then every second one of twice as many heads."""
        full = 1 << (self.num_heads.bit_length() - 1)
        steps = [*range(2, 2 * full + 1, 2), *range(1, 2 * (self.num_heads - full), 2)]
        return np.array([power(2.0, -Fraction(self.steepness) * step / (2 * full)) for step in steps])


def position_bias(spec: PositionBiasSpec | AlibiSpec, max_positions: int, factory: WeightFactory[A]) -> A:
    """The bias of each of this rank's heads at each distance; see `AttentionOptions`."""
    own, half = factory.ranks.own(spec.num_heads), max_positions + BIAS_MARGIN
    if isinstance(spec, AlibiSpec):
        slopes = spec.slopes[own.start : own.stop, None].astype(np.float32)
        return factory.constant(slopes * -np.abs(np.arange(-half, half)).astype(np.float32))
    return factory.derived_tensor(
        f"{spec.name}.weight",
        (len(own), 2 * half),
        lambda made: _Buckets(spec, own, half, partial(factory.ops.store, made)),
        factory.ops.dtype("float32"),
    )


class _Buckets:
    """A parameter that spreads its rows, one for each bucket, over the distances from -half to half - 1."""

    def __init__(
        self, spec: PositionBiasSpec, own: range, half: int, store: Callable[[int, NDArray[Any]], None]
    ) -> None:
        self.shape: tuple[int, ...] = (spec.num_buckets, spec.num_heads)
        self._spec, self._own, self._half, self._store = spec, own, half, store
        self._rows = np.zeros(self.shape, np.float32)

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self._rows[first : first + len(rows)] = rows
        if first + len(rows) == len(self._rows):
            distances = np.arange(-self._half, self._half)
            by_distance = self._rows[buckets(distances, self._spec.num_buckets, self._spec.max_distance)]
            self._store(0, np.ascontiguousarray(by_distance[:, self._own.start : self._own.stop].T))


def buckets(distances: NDArray[np.int64], num_buckets: int, max_distance: int) -> NDArray[np.int64]:
    """The buckets of these distances, which are negative for keys before the query."""
    half = num_buckets // 2
    exact, size = half // 2, np.abs(distances)
    # In float32, as in `transformers`, so that roundings put distances into the same buckets.
    growth = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact))
    growth = growth / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    far = np.minimum(exact + growth.astype(np.int64), half - 1)
    found: NDArray[np.int64] = np.where(size < exact, size, far) + half * (distances > 0)
    return found
