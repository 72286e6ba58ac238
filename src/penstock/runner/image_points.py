"""Where a forward pass puts features of images, and positions of multi-axis rotary embeddings; see `ImagePoints`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from penstock.core.plan import ForwardPlan, ImageRows
from penstock.kernels.array_types import A
from penstock.kernels.lora.rows import IntArray
from penstock.kernels.ops import Ops
from penstock.models.decoder import PositionTables
from penstock.models.spec import ModelSpec
from penstock.native import Library
from penstock.native.array import INT64, Array
from penstock.native.program import Program

if TYPE_CHECKING:
    from penstock.runner.image_runner import ImageRunner

Positions = NDArray[np.int64]


class EagerImages(Generic[A]):
    """Puts a step's features in place when the model's code gets there."""

    def __init__(self, images: ImageRunner[A], ops: Ops[A], device: str, *, has_axes: bool) -> None:
        """
        Args:
            has_axes: whether the model's rotary embedding has several axes.
        """
        self._images, self._ops, self._device, self._has_axes = images, ops, device, has_axes
        self._rows: list[ImageRows] = []
        self.positions: A | None = None

    def begin_step(self, plan: ForwardPlan, plain: IntArray, tables: PositionTables[A]) -> None:
        """Set the step's rows and positions."""
        self._rows = plan.image_rows
        if self._has_axes:
            positions = positions_by_axis(plan, plain)
            tables.prepare(positions)
            self.positions = self._ops.constant(positions, None, self._device)

    def place(self, x: A, depth: int) -> None:
        self._images.place(x, depth, self._rows)


class RecordedImages:
    """Notes where a recorded pass would put features, and runs a step's calls from one such place to the next."""

    def __init__(self, images: ImageRunner[Array], program: Program, *, has_axes: bool) -> None:
        """
        Args:
            has_axes: as of `EagerImages`.
        """
        self._images, self._program = images, program
        self.positions: Array | None = program.array((3,), INT64) if has_axes else None
        self._points: list[tuple[int, Array]] = []

    def place(self, x: Array, depth: int) -> None:
        assert depth == len(self._points)
        self._points.append((self._program.num_calls, x.memory))

    def begin_step(self, plan: ForwardPlan, plain: IntArray, tables: PositionTables[Array]) -> None:
        """Set the step's positions."""
        if self.positions is not None:
            positions = positions_by_axis(plan, plain)
            tables.prepare(positions)
            self.positions.fill(positions, len(plain))

    def run(self, image_rows: list[ImageRows], count: int, library: Library) -> int:
        """Run the calls up to the last place, and put features there; returns the number of calls that ran."""
        done = 0
        for depth, (calls, x) in enumerate(self._points if image_rows else ()):
            library.run(self._program.segment(count, done, calls))
            self._images.place(x, depth, image_rows)
            done = calls
        return done


def stand_ins(plan: ForwardPlan, token_ids: IntArray, stand_in: int) -> IntArray:
    """The tokens, with `stand_in` in place of images' placeholders, whose embeddings are replaced."""
    replaced: IntArray = token_ids.copy()
    for image in plan.image_rows:
        replaced[np.frombuffer(image.rows, np.int32)] = stand_in
    return replaced


def positions_by_axis(plan: ForwardPlan, plain: IntArray) -> Positions:
    """[num_tokens, 3]: the plan's positions, or each token's plain one three times."""
    if plan.rope_positions is None:
        return np.repeat(plain.astype(np.int64)[:, None], 3, 1)
    return np.ascontiguousarray(np.frombuffer(plan.rope_positions, np.int32).reshape(3, -1).T.astype(np.int64))


def has_axes(spec: ModelSpec) -> bool:
    """Whether a rotary embedding of the model has several axes."""
    return any(rope.axes for rope in spec.ropes)
