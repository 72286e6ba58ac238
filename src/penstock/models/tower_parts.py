"""The parts of a vision tower before and after its layers: patch embedding, position embeddings, connectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.layers.encoder_head import wide
from penstock.layers.norm import Norm
from penstock.layers.spec import NormSpec
from penstock.models.patches import PatchGrid, antialiased, bilinear_places, nearest_places
from penstock.models.spec import (
    ConnectorPart,
    MergeSpec,
    PatchPositions,
    PatchSpec,
    ProjectionSpec,
    RootMeanSpec,
    TowerSpec,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.kernels.elementwise import RMSNormOp
    from penstock.kernels.linear.weight import Weight
    from penstock.kernels.memory import Store
    from penstock.quantization.base import WeightFactory

_VECTOR = 64
"""Columns of the patch embedding are a multiple of this, which kernels read whole; the others are zeros."""


@dataclass(slots=True)
class _ConvertedRows(Generic[A]):
    """A checkpoint tensor whose rows are converted to those of a matrix."""

    store: Store[A]
    target: Weight[A]
    shape: tuple[int, ...]
    convert: Callable[[NDArray[Any]], NDArray[Any]]

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self.store(self.target, first, np.ascontiguousarray(self.convert(rows)))


class PatchEmbedding(Generic[A]):
    """The linear map of patches, whose pixels are ordered by channel."""

    def __init__(self, spec: PatchSpec, hidden_size: int, factory: WeightFactory[A]) -> None:
        size = spec.size
        self.columns = -(-3 * size**2 // _VECTOR) * _VECTOR
        shape: tuple[int, ...] = (hidden_size, 3, size, size)
        if spec.frames is not None:
            shape = (hidden_size, 3, spec.frames, size, size)
        if spec.flat is not None:
            shape = (hidden_size, 3 * size**2)
        convert = partial(_patch_rows, spec=spec, columns=self.columns)
        self._weight = factory.derived(
            spec.name,
            hidden_size,
            self.columns,
            lambda weight: _ConvertedRows(factory.ops.store, weight, shape, convert),
        )
        self._bias = factory.bias((spec.name,), (hidden_size,), self._weight.bias_dtype) if spec.bias else None
        self._dtype = factory.dtype

    def __call__(self, patches: A) -> A:
        """[patches, columns] -> [patches, hidden_size]"""
        return self._weight.linear(patches, self._bias, self._dtype)


def _patch_rows(rows: NDArray[Any], spec: PatchSpec, columns: int) -> NDArray[Any]:
    """Rows of a patch embedding as rows over channels, then pixels, then zeros."""
    count = len(rows)
    if spec.flat == "pixels":
        rows = rows.reshape(count, spec.size**2, 3).swapaxes(1, 2)
    if spec.frames is not None:
        rows = rows.astype(np.float32).sum(2).astype(rows.dtype)
    made = np.zeros((count, columns), rows.dtype)
    made[:, : 3 * spec.size**2] = rows.reshape(count, -1)
    return made


class Places(Generic[A]):
    """The position embeddings of patches."""

    def __init__(self, spec: TowerSpec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops, self._constant = spec.positions, factory.ops, factory.constant
        self._dtype, self._table = factory.dtype, None
        if spec.positions is not None:
            side, extra = spec.positions.side, 0 if spec.positions.class_row is None else 1
            if spec.positions.kind == "axes":
                self._table = _stacked_rows(spec.positions.name, 2, side, spec.hidden_size, factory)
            else:
                self._table = factory.tensor(spec.positions.name, side**2 + extra, spec.hidden_size)

    def of(self, grid: PatchGrid) -> A | None:
        """[patches, hidden_size], and one row more with a class token; None: there are none."""
        if self._spec is None or self._table is None:
            return None
        side = self._spec.side
        if self._spec.kind == "axes":
            by_row, by_column = self._rows(side + grid.rows), self._rows(grid.columns)
            return self._ops.add_rows(by_column, by_row, 1.0)
        if self._spec.kind == "nearest":
            return self._rows(_with_class(nearest_places(grid, side), self._spec))
        if self._spec.kind == "antialiased":
            whole = self._ops.on_host(wide(self._table, self._ops))
            return self._constant(antialiased(whole, grid, side), self._dtype)
        places, weights = bilinear_places(grid, side)
        total = np.zeros((len(places), self._table.shape[1]), np.float32)
        for tap in range(places.shape[1]):
            rows = self._ops.on_host(wide(self._rows(places[:, tap]), self._ops))
            total += rows * weights[:, tap, None]
        return self._constant(total, self._dtype)

    def _rows(self, places: NDArray[np.int64]) -> A:
        assert self._table is not None
        return self._ops.gather(self._table, self._constant(np.ascontiguousarray(places)))


def _with_class(places: NDArray[np.int64], spec: PatchPositions) -> NDArray[np.int64]:
    """The rows of the table for patches at `places`, and for the class token after them."""
    if spec.class_row is None:
        return places
    is_first = spec.class_row == "first"
    return np.append(places + is_first, 0 if is_first else spec.side**2)


def _stacked_rows(name: str, count: int, rows: int, columns: int, factory: WeightFactory[A]) -> A:
    """A checkpoint tensor [count, rows, columns] as one of [count * rows, columns]."""

    def parameter(target: A) -> _TakenRows:
        def load(first: int, stacked: NDArray[Any]) -> None:
            factory.ops.store(target, first * rows, stacked.reshape(-1, columns))

        return _TakenRows((count, rows, columns), load)

    return factory.derived_tensor(name, (count * rows, columns), parameter)


@dataclass(slots=True)
class _TakenRows:
    """A checkpoint tensor whose rows a function takes."""

    shape: tuple[int, ...]
    take: Callable[[int, NDArray[Any]], None]

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self.take(first, rows)


class Connector(Generic[A]):
    """The parts after a layer, or after the last: norms, merges and linear maps."""

    def __init__(self, parts: Sequence[ConnectorPart], count: int, size: int, factory: WeightFactory[A]) -> None:
        """
        Args:
            count: number of vectors that are merged into one.
            size: the tower's hidden size.
        """
        self._parts = [_part(part, count, size, factory) for part in parts]
        self._ops, self._constant = factory.ops, factory.constant

    def __call__(self, x: A, restore: NDArray[np.int64] | None = None) -> A:
        """`x` [patches, hidden_size] -> [merged patches, size] in reading order.

        Args:
            restore: as of `PatchGrid`.
        """
        for part in self._parts:
            x = part(x)
        return x if restore is None else self._ops.gather(x, self._constant(restore))


def _part(part: ConnectorPart, count: int, size: int, factory: WeightFactory[A]) -> Callable[[A], A]:
    if isinstance(part, NormSpec):
        return Norm(part, factory)
    if isinstance(part, ProjectionSpec):
        return _Projection(part, count, factory)
    if isinstance(part, RootMeanSpec):
        ones = factory.constant(np.ones(part.size, np.float32))
        return partial(_normed, weight=ones, eps=part.eps, norm=factory.ops.rms_norm)
    if part.mean:
        return _Mean(part, count, size, factory)
    return partial(_side_by_side, count=count)


def _side_by_side(x: A, count: int) -> A:
    return x.view(-1, count * x.shape[1])


def _normed(x: A, weight: A, eps: float, norm: RMSNormOp[A]) -> A:
    return norm(x, weight, eps)


class _Mean(Generic[A]):
    """The mean of merged vectors, times a factor, optionally standardised."""

    def __init__(self, spec: MergeSpec, count: int, size: int, factory: WeightFactory[A]) -> None:
        self._factor, self._count = np.float32(spec.factor), count
        self._ops, self._dtype, self._constant = factory.ops, factory.dtype, factory.constant
        names = (spec.bias, spec.scale)
        self._bias, self._scale = (None if name is None else factory.float32(name, size) for name in names)

    def __call__(self, x: A) -> A:
        rows = self._ops.on_host(wide(x, self._ops))
        made = rows.reshape(-1, self._count, rows.shape[1]).mean(1, dtype=np.float32) * self._factor
        if self._bias is not None:
            made = made - self._ops.on_host(self._bias)
        if self._scale is not None:
            made = made * self._ops.on_host(self._scale)
        return self._constant(made, self._dtype)


class _Projection(Generic[A]):
    """A linear map, whose matrix the checkpoint may order in its own way."""

    def __init__(self, spec: ProjectionSpec, count: int, factory: WeightFactory[A]) -> None:
        self._ops, self._dtype, self._activation = factory.ops, factory.dtype, spec.activation
        self._weight: Weight[A]
        if spec.layout == "usual":
            self._weight = factory.matrix(spec.name, spec.out_size, spec.in_size)
        elif spec.layout == "transposed":
            self._weight = factory.weight_of(spec.name, spec.out_size, spec.in_size)
            factory.parameters[spec.name] = _transposed(spec, self._weight, factory.ops.store)
        else:
            self._weight = factory.derived(
                spec.name, spec.out_size, spec.in_size, partial(_side_by_side_rows, spec, count, factory.ops.store)
            )
        self._bias = factory.bias((spec.name,), (spec.out_size,), self._weight.bias_dtype) if spec.bias else None

    def __call__(self, x: A) -> A:
        x = self._weight.linear(x, self._bias, self._dtype)
        return x if self._activation is None else self._ops.activate(x, self._activation)


def _transposed(spec: ProjectionSpec, weight: Weight[A], store: Store[A]) -> _TakenRows:
    gathered: list[NDArray[Any]] = []

    def load(first: int, rows: NDArray[Any]) -> None:
        gathered.append(rows.copy())
        if first + len(rows) == spec.in_size:  # rows are loaded in order
            store(weight, 0, np.ascontiguousarray(np.concatenate(gathered).T))
            gathered.clear()

    return _TakenRows((spec.in_size, spec.out_size), load)


def _side_by_side_rows(spec: ProjectionSpec, count: int, store: Store[A], weight: Weight[A]) -> _ConvertedRows[A]:
    def convert(rows: NDArray[Any]) -> NDArray[Any]:
        by_patch: NDArray[Any] = rows.reshape(len(rows), -1, count).swapaxes(1, 2)
        return by_patch.reshape(len(rows), -1)

    return _ConvertedRows(store, weight, (spec.out_size, spec.in_size), convert)
