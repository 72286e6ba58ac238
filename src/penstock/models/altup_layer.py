"""The decoder layer of Gemma 3n, which computes one of several residual streams."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic

from penstock.kernels.array_types import A
from penstock.kernels.elementwise import Columns
from penstock.layers.altup import AltUp, AltUpSpec, Laurel, stream_of
from penstock.layers.norm import Norm
from penstock.models.spec import LayerSpec, SubLayer
from penstock.models.stream import Stream

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.layers.spec import StepInputs
    from penstock.quantization.base import WeightFactory


class AltUpLayer(Generic[A]):
    """A layer whose stream has all of a token's streams side by side. See `DecoderLayer` for the methods.

    n = norm(p_0)                                           p: the predicted streams
    a = (p_0 + norm(mixer(n)) + laurel(n)) / sqrt(2)
    y = a + norm(feed_forward(norm(a)))
    x = corrected(p, y); x_1 .. += norm(per_layer(scale * x_0))
    """

    def __init__(self, spec: LayerSpec, altup: AltUpSpec, factory: WeightFactory[A], *, is_last: bool) -> None:
        factory = factory.at(spec.name)
        self._ops, self._size, self._streams, self._wide = factory.ops, altup.size, altup.streams, altup.wide
        self._altup, self._laurel = AltUp(altup, factory), Laurel(altup, factory)
        assert spec.mixer is not None
        assert spec.feed_forward is not None
        assert spec.per_layer is not None
        self._before_mixer, self._after_mixer = _norms(spec.mixer, factory)
        self._mixer = spec.mixer.part.build(factory)
        self._before_feed_forward, self._after_feed_forward = _norms(spec.feed_forward, factory)
        self._feed_forward = spec.feed_forward.part.build(factory.precise() if is_last else factory)
        assert spec.per_layer.norm_after is not None
        self._per_layer, self._after_per_layer = (
            spec.per_layer.part.build(factory),
            Norm(spec.per_layer.norm_after, factory),
        )

    def mix_tokens(
        self, stream: Stream[A], step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None
    ) -> tuple[A, A]:
        ops, size = self._ops, self._size
        predicted = self._altup.predict(stream.x)
        taken = self._before_mixer(stream_of(predicted, size, ops))
        parts = ops.empty_rows(predicted, (self._wide,), predicted.dtype)  # the last is filled later
        ops.copy_columns(predicted, parts, Columns(0, 0, self._streams * size))
        ops.copy_columns(self._laurel(taken, step.adapters), parts, Columns(0, self._streams * size, size))
        return self._mixer.mix(taken, step, batch, cache), parts

    def feed_forward(
        self,
        mixed: A,
        residual: A | None,
        inputs: A | None = None,
        *,
        adapters: AdapterRows | None = None,
    ) -> Stream[A]:
        assert residual is not None
        assert inputs is not None
        parts, ops, size, count = residual, self._ops, self._size, self._streams
        beside = ops.add_rows(stream_of(parts, size, ops), stream_of(parts, size, ops, count), 1.0)
        attended = ops.add_rows(self._after_mixer(self._mixer.output(mixed, adapters)), beside, 1.0)
        attended = ops.activate(attended, None, factor=math.sqrt(0.5))
        made = self._after_feed_forward(self._feed_forward(self._before_feed_forward(attended), adapters))
        result = ops.add_rows(made, attended, 1.0)
        ops.copy_columns(result, parts, Columns(0, count * size, size))
        factors = self._altup.factors(result)
        first = self._altup.corrected_first(parts, factors)
        ops.copy_columns(
            self._after_per_layer(self._per_layer(first, inputs, adapters)), parts, Columns(0, (count + 1) * size, size)
        )
        return Stream(self._altup.corrected(parts, factors))


def _norms(spec: SubLayer[Any], factory: WeightFactory[A]) -> tuple[Norm[A], Norm[A]]:
    assert spec.norm is not None
    assert spec.norm_after is not None
    return Norm(spec.norm, factory), Norm(spec.norm_after, factory)
