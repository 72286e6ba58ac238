"""AltUp and LAuReL of Gemma 3n: several residual streams; each layer computes one and predicts the others.

wide = [x_0 .. x_n-1]                                       a token's streams, side by side
p_i  = x_i + sum of P(x_0)[i, j] * x_j                      predicted before the layer, which takes p_0
x_i  = p_i + (1 + C(y)[i]) * (y - p_0)                      corrected by its result y

P and C are linear maps of tanh(router(norm(.) / size)). AltUp: Baykal et al., 2023, arXiv:2301.13310; LAuReL: Menghani
et al., 2024, arXiv:2411.07501.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from penstock.config.model_facts import ActivationSizes
from penstock.config.weight_formats import FLOAT
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.elementwise import Columns
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.layers.spec import NormSpec
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.kernels.lora.rows import AdapterRows
    from penstock.kernels.ops import Ops
    from penstock.quantization.base import WeightFactory

_LEAST = 1e-5
"""Least mean square of a stream before it is scaled."""


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """The streams of a model, and the LAuReL block of its layers."""

    size: int
    """Of a stream (`hidden_size`)."""
    streams: int
    rank: int
    """Of the LAuReL block's matrices."""
    norm_eps: float
    scales_output: bool = True
    """Whether the per-layer input takes the first stream times a learned vector."""

    @property
    def wide(self) -> int:
        """Columns of the streams, of a layer's result and of its per-layer input."""
        return (self.streams + 2) * self.size

    @property
    def activation_sizes(self) -> ActivationSizes:
        columns = 3 * self.wide + 8 * self.size + self.rank + 4 * self.streams * (self.streams + 2)
        return ActivationSizes(columns, 4 * columns, self.wide)


class AltUp(Generic[A]):
    """Predicts the streams before a layer, and corrects them after it."""

    def __init__(self, spec: AltUpSpec, factory: WeightFactory[A]) -> None:
        below, size, count = factory.at("altup"), spec.size, spec.streams
        self._spec, self._ops, self._float32 = spec, factory.ops, factory.logits_dtype
        self._norm = below.float32("router_norm.weight", Piece(size, whole=True), factor=1 / size)
        self._router = below.linear(("modality_router",), (count,), size, whole=True)
        same = np.eye(count, dtype=np.float32)
        self._prediction = _Factors("prediction_coefs", count * count, count, below, lambda rows: rows, same)
        # the inputs of the corrected streams: all predicted ones, the result, the per-layer input
        constant = np.concatenate((same, np.ones((count, 1)), np.arange(count)[:, None] > 0), 1, dtype=np.float32)
        constant[:, 0] -= 1
        self._correction = _Factors("correction_coefs", count, count, below, _of_difference, constant)
        self._scale = below.float32("correct_output_scale", Piece(size, whole=True)) if spec.scales_output else None

    def predict(self, wide: A) -> A:
        """`wide` [num_tokens, streams * size, or more] -> [num_tokens, streams * size]."""
        count, size = self._spec.streams, self._spec.size
        factors = self._prediction(self._modalities(stream_of(wide, size, self._ops)))
        return self._ops.mix_streams(wide, factors, count, count, size)

    def factors(self, result: A) -> A:
        """Those of `corrected_first` and `corrected`, from the layer's `result` [num_tokens, size]."""
        return self._correction(self._modalities(result))

    def corrected_first(self, parts: A, factors: A) -> A:
        """The first stream, scaled: [num_tokens, size]; `parts` [num_tokens, wide] has predictions and the result."""
        count, size = self._spec.streams, self._spec.size
        return self._ops.mix_streams(parts, factors, count + 1, 1, size, scale=self._scale)

    def corrected(self, parts: A, factors: A) -> A:
        """All streams: [num_tokens, streams * size]; `parts` has the per-layer input, too."""
        count, size = self._spec.streams, self._spec.size
        return self._ops.mix_streams(parts, factors, count + 2, count, size)

    def _modalities(self, x: A) -> A:
        routed = self._ops.rms_norm(x, self._norm, self._spec.norm_eps)
        return self._ops.activate(self._router.linear(routed, None, self._float32), "tanh")


def _of_difference(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The factors of stream i, of (result - first prediction): [streams, columns] -> [streams * inputs, columns]."""
    count, columns = rows.shape
    made = np.zeros((count, count + 2, columns), np.float32)
    made[:, 0], made[:, count] = -rows, rows
    return made.reshape(-1, columns)


class _Factors(Generic[A]):
    """A linear map in float32, whose matrix and bias are made of a small matrix of the checkpoint."""

    def __init__(
        self,
        name: str,
        rows: int,
        columns: int,
        factory: WeightFactory[A],
        make: Callable[[NDArray[Any]], NDArray[Any]],
        constant: NDArray[np.float32],
    ) -> None:
        self._float32 = factory.logits_dtype
        self._bias = factory.constant(constant.reshape(-1))
        self._weight = factory.ops.new_weight(
            constant.size, columns, FLOAT, gated=False, dtype=self._float32, device=factory.device
        )
        factory.whole_matrix(
            name, rows, columns, lambda whole: factory.ops.store(self._weight, 0, make(whole.astype(np.float32)))
        )

    def __call__(self, x: A) -> A:
        return self._weight.linear(x, self._bias, self._float32)


class Laurel(Generic[A]):
    """x + norm(right(left(x)))."""

    def __init__(self, spec: AltUpSpec, factory: WeightFactory[A]) -> None:
        below, size = factory.at("laurel"), spec.size
        self._left, self._right = (
            Linear((name,), columns, (rows,), below, bias=False, gather_output=True)
            for name, columns, rows in (("linear_left", size, spec.rank), ("linear_right", spec.rank, size))
        )
        self._norm = Norm(NormSpec("post_laurel_norm", size, spec.norm_eps), below)
        self._add_rows = factory.ops.add_rows

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        return self._add_rows(x, self._norm(self._right(self._left(x, adapters), adapters)), 1.0)


class StreamEnds(Generic[A]):
    """The streams of embeddings, and the hidden states of streams: each further stream has a linear map at both ends,
    whose result is scaled to the magnitude of the first stream.
    """

    def __init__(self, spec: AltUpSpec, factory: WeightFactory[A]) -> None:
        self._spec, self._ops, size = spec, factory.ops, spec.size
        self._in, self._out = (
            [
                Linear((f"{name}.{index}",), size, (size,), factory, bias=False, gather_output=True)
                for index in range(spec.streams - 1)
            ]
            for name in ("model.altup_projections", "model.altup_unembed_projections")
        )

    def expand(self, x: A, adapters: AdapterRows | None = None) -> A:
        """[num_tokens, size] -> [num_tokens, streams * size]."""
        ops, size = self._ops, self._spec.size
        wide = ops.empty_rows(x, (self._spec.streams * size,), x.dtype)
        ops.copy_columns(x, wide, Columns(0, 0, size))
        for index, project in enumerate(self._in):
            made = ops.match_magnitude(project(x, adapters), x, _LEAST)
            ops.copy_columns(made, wide, Columns(0, (index + 1) * size, size))
        return wide

    def collapse(self, wide: A, adapters: AdapterRows | None = None) -> A:
        """[num_tokens, streams * size] -> [num_tokens, size]."""
        ops, size = self._ops, self._spec.size
        total = stream_of(wide, size, ops)
        for index, project in enumerate(self._out):
            made = ops.match_magnitude(project(stream_of(wide, size, ops, index + 1), adapters), wide, _LEAST)
            total = ops.add_rows(made, total, 1.0)
        return ops.activate(total, None, factor=1 / self._spec.streams)


def stream_of(x: A, size: int, ops: Ops[A], index: int = 0) -> A:
    """A copy of the columns of stream `index`: [num_tokens, size]."""
    made = ops.empty_rows(x, (size,), x.dtype)
    ops.copy_columns(x, made, Columns(index * size, 0, size))
    return made
