"""The decoder: runs any model that a `ModelSpec` describes as a list of layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.array_types import A
from penstock.layers.altup import StreamEnds
from penstock.layers.embedding import Embedding, OutputHead
from penstock.layers.norm import Norm
from penstock.layers.per_layer import PerLayerEmbedding
from penstock.layers.position_bias import position_bias
from penstock.layers.rotary import PAGE, Rotary, Temperatures
from penstock.layers.spec import StepInputs
from penstock.models.altup_layer import AltUpLayer
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer
from penstock.models.stream import Residual, Stream
from penstock.quantization.rows import Piece

if TYPE_CHECKING:
    from penstock.api.request import MediaKind
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.layers.rope import RopeConfig, TemperatureConfig
    from penstock.quantization.base import WeightFactory


class SubLayerNorms(Generic[A]):
    """The norms before and after a part of a layer, the norm of the residual sum, and factors; each is optional."""

    def __init__(self, spec: SubLayer[Any], factory: WeightFactory[A]) -> None:
        self.before = None if spec.norm is None else Norm(spec.norm, factory)
        self.after = None if spec.norm_after is None else Norm(spec.norm_after, factory)
        self._of_sum = None if spec.norm_of_sum is None else Norm(spec.norm_of_sum, factory)
        self._input_factor, self._output_factor, self._activate = (
            spec.input_factor,
            spec.output_factor,
            factory.ops.activate,
        )

    def take(self, stream: Stream[A], adding: Residual[A], *, beside: bool = False) -> tuple[A, A]:
        """Returns (the part's input, the residual stream); see `Residual.normed`.

        Args:
            beside: see `LayerSpec`.
        """
        if beside:
            assert self.before is not None
            assert stream.residual is not None, "the layer before added its mixer's output"
            taken, residual = self.before(stream.residual), adding.added(stream)
        else:
            taken, residual = adding.normed(stream, self.before)
        if self._input_factor != 1.0:
            taken = self._activate(taken, None, factor=self._input_factor)
        return taken, residual

    def stream(self, x: A, residual: A, adding: Residual[A]) -> Stream[A]:
        """The residual stream after the part with the output `x`."""
        if self._output_factor != 1.0:
            x = self._activate(x, None, factor=self._output_factor)
        stream = Stream(x, residual, self.after)
        return stream if self._of_sum is None else Stream(adding.normed(stream, self._of_sum)[0])


class DecoderLayer(Generic[A]):
    """A mixer and a feed-forward part, each with norms and a residual connection; either may be missing.

    Computed in two steps, because everything after the mixer processes tokens independently: in the last layer it runs
    only for the tokens whose logits are needed.
    """

    def __init__(
        self,
        spec: LayerSpec,
        factor: float,
        factory: WeightFactory[A],
        *,
        is_last: bool = False,
        beside: DecoderLayer[A] | None = None,
    ) -> None:
        """
        Args:
            factor: scales each part's output before it is added to the residual stream.
            is_last: whether this is the last layer, whose `feed_forward` uses precise kernels: only tokens with logits
                go through it.
            beside: the layer whose mixer's input this layer's mixer takes; see `LayerSpec`.
        """
        factory = factory.at(spec.name)
        self._residual = Residual(factor, factory.ops)
        self._mixer = self._feed_forward = self._per_layer = None
        if spec.mixer is not None:
            self._mixer_norms = SubLayerNorms(spec.mixer, factory)
            self._mixer = spec.mixer.part.build(factory)
        self._is_beside = beside is not None
        if beside is not None:
            self._mixer_norms.before = beside._mixer_norms.before
        if spec.feed_forward is not None:
            self._feed_forward_norms = SubLayerNorms(spec.feed_forward, factory)
            self._feed_forward = spec.feed_forward.part.build(factory.precise() if is_last else factory)
        if spec.per_layer is not None:
            self._per_layer_norms = SubLayerNorms(spec.per_layer, factory)
            self._per_layer = spec.per_layer.part.build(factory)
        self._scale = None if spec.scale is None else factory.float32(spec.scale, Piece(1, whole=True))
        self._parallel, self._add_rows = spec.parallel, factory.ops.add_rows

    def mix_tokens(
        self, stream: Stream[A], step: StepInputs[A], batch: Batch, cache: AnyCache[A] | None
    ) -> tuple[A, A | None]:
        """Run the mixer. Returns its output, for `feed_forward`, and the residual stream [num_tokens, hidden_size].

        Args:
            stream: the output of the previous layer. Without a mixer it is returned as it is; in a model's first layer
                it has no residual.
        """
        if self._mixer is None:
            plain = stream.after is None and stream.total is None
            assert plain, "layers without a mixer follow others without a last norm and scale"
            return stream.x, stream.residual
        taken, residual = self._mixer_norms.take(stream, self._residual, beside=self._is_beside)
        return self._mixer.mix(taken, step, batch, cache), residual

    def feed_forward(
        self,
        mixed: A,
        residual: A | None,
        inputs: A | None = None,
        *,
        adapters: AdapterRows | None = None,
    ) -> Stream[A]:
        """Run the rest of the layer after `mix_tokens`; returns the layer's output.

        Args:
            mixed, residual: the result of `mix_tokens`.
            inputs: the per-layer inputs, if the model has per-layer embeddings.
            adapters: the tokens' LoRA adapters.
        """
        if self._parallel:
            return self._side_by_side(mixed, residual, adapters)
        # The addition waits: the next norm adds and normalizes in one pass over the rows.
        stream = Stream(mixed, residual)
        if self._mixer is not None:
            assert residual is not None
            stream = self._mixer_norms.stream(self._mixer.output(mixed, adapters), residual, self._residual)
        if self._feed_forward is not None:
            taken, residual = self._feed_forward_norms.take(stream, self._residual)
            stream = self._feed_forward_norms.stream(self._feed_forward(taken, adapters), residual, self._residual)
        if self._per_layer is not None:
            assert inputs is not None
            taken, residual = self._per_layer_norms.take(stream, self._residual)
            stream = self._per_layer_norms.stream(self._per_layer(taken, inputs, adapters), residual, self._residual)
        return replace(stream, total=self._scale)

    def _side_by_side(self, mixed: A, residual: A | None, adapters: AdapterRows | None) -> Stream[A]:
        """`feed_forward` of a layer whose parts take the same stream."""
        norm = self._feed_forward_norms.before or self._mixer_norms.before
        assert self._mixer is not None
        assert self._feed_forward is not None
        assert residual is not None
        assert norm is not None
        mixed = self._mixer.output(mixed, adapters)
        return Stream(self._add_rows(self._feed_forward(norm(residual), adapters), mixed, 1.0), residual)


class PositionTables(Generic[A]):
    """The tables of rotary angles and query factors, from which each step's `StepInputs` are gathered, and the position
    bias.
    """

    def __init__(self, spec: ModelSpec, max_positions: int, factory: WeightFactory[A]) -> None:
        """
        Args:
            max_positions: the maximum model length in tokens; 0: no tables, in a build that only records sizes.
        """
        self._rotaries: dict[RopeConfig, Rotary[A]] = {}
        self._temperatures: dict[TemperatureConfig, Temperatures[A]] = {}
        self._bias: A | None = None
        if not max_positions:
            return
        self._rotaries = {rope: Rotary(rope, max_positions, factory) for rope in spec.ropes}
        self._temperatures = {
            temperature: Temperatures(temperature, max_positions, factory) for temperature in spec.temperatures
        }
        if spec.position_bias is not None:
            self._bias = position_bias(spec.position_bias, max_positions, factory)
        self._is_computed = np.zeros(-(-max_positions // PAGE), np.bool_)  # of each page

    def prepare(self, positions: NDArray[np.integer[Any]]) -> None:
        """Compute the pages of the tables that have these positions [num_tokens], which `inputs` may then take."""
        if not self._rotaries:
            return
        pages = positions // PAGE
        if self._is_computed[pages].all():  # as in most steps
            return
        # All tables of a page together, so that one flag says whether it is computed.
        for page in set(pages[~self._is_computed[pages]].tolist()):
            for rotary in self._rotaries.values():
                rotary.compute_page(page)
            self._is_computed[page] = True

    def inputs(self, positions: A, adapters: AdapterRows | None = None, by_axis: A | None = None) -> StepInputs[A]:
        """The inputs at `positions` [num_tokens] int64, with the tokens' adapters.

        Args:
            by_axis: [num_tokens, 3] int64, the positions of multi-axis rotary embeddings; None: `positions`.
        """
        return StepInputs(
            positions,
            {rope: _angles(rotary, positions, by_axis) for rope, rotary in self._rotaries.items()},
            {temperature: temperatures.at(positions) for temperature, temperatures in self._temperatures.items()},
            adapters,
            self._bias,
        )


def _angles(rotary: Rotary[A], positions: A, by_axis: A | None) -> A:
    found = None if by_axis is None else rotary.angles_by_axis(by_axis)
    return rotary.angles(positions) if found is None else found


class ImagePoints(Protocol[A]):
    """What a step has of images. A recorded pass only notes where `place` is called."""

    positions: A | None
    """[num_tokens, 3] int64, for rotary embeddings with several axes; None: the model has none."""

    def place(self, x: A, depth: int) -> None:
        """Replace rows of the embeddings `x` [num_tokens, hidden_size] by features (depth 0), or add the features of
        tap `depth` - 1 to the output of that layer."""
        ...


class Decoder(Generic[A]):
    """Token ids in, logits out, over a paged KV cache. The loader fills the weights.

    `forward` and `compute_logits` are also called once with recorded tensors, which have no content: neither may branch
    on a tensor's content or number of rows.
    """

    def __init__(self, spec: ModelSpec, max_positions: int, factory: WeightFactory[A]) -> None:
        """
        Args:
            max_positions: see `PositionTables`.
        """
        self.spec = spec
        self._ops = factory.ops
        names, tied = spec.names, spec.tie_embeddings
        table = (spec.vocab_size, spec.hidden_size)
        output = names.embedding if tied else names.output
        bias = names.output if spec.output_bias else None
        self.output = OutputHead(output, *table, factory, bias=bias, adapted=names.output)
        self.embedding = self.output if tied else Embedding(names.embedding, *table, factory)
        self._embedding_updates = factory.lookup_table(names.embedding, *table)
        self._embedding_norm = None if spec.embedding_norm is None else Norm(spec.embedding_norm, factory)
        self._position_table = None
        if (own := spec.positions) is not None:
            self._position_table = Embedding(own.name, own.rows - own.first, spec.hidden_size, factory)
            factory.skip_rows(own.name, own.first)
        self._per_layer = None if spec.per_layer is None else PerLayerEmbedding(spec.per_layer, factory)
        self.positions = PositionTables(spec, max_positions, factory)
        """Prepared for the step's positions before `forward`."""
        self._residual = Residual(spec.residual_multiplier, factory.ops)
        last = spec.layers[-1]
        self._streams = None if last.altup is None else StreamEnds(last.altup, factory)
        self.layers: list[DecoderLayer[A] | AltUpLayer[A]] = []
        made: DecoderLayer[A] | None = None
        for layer in spec.layers:
            if layer.altup is not None:
                self.layers.append(AltUpLayer(layer, layer.altup, factory, is_last=layer is last))
                continue
            beside = made if layer.beside else None
            made = DecoderLayer(layer, spec.residual_multiplier, factory, is_last=layer is last, beside=beside)
            self.layers.append(made)
        self.final_norm = Norm(spec.final_norm, factory)
        self.adapted, self.adapted_heads = factory.adapted, factory.adapted_heads
        self.adapted_embeddings = factory.adapted_embeddings
        self._num_taps = 0 if spec.tower is None else len(spec.tower.taps)
        self.towers: dict[MediaKind, Any] = {}
        """The encoder of each kind of media, once loaded; empty: the model takes text only."""

    def forward(
        self,
        token_ids: A,
        positions: A,
        batches: Sequence[Batch],
        caches: Sequence[AnyCache[A] | None],
        adapters: AdapterRows | None = None,
        *,
        whole: bool = False,
        images: ImagePoints[A] | None = None,
    ) -> tuple[A, ...]:
        """Run a step's tokens through the layers, and write the caches.

        Returns the inputs of the last layer's `feed_forward`; `compute_logits` computes the rest, for the needed rows
        only.

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64.
            batches: one per layer.
            caches: one per layer.
            adapters: the tokens' LoRA adapters.
            whole: return the hidden states of all tokens after the final norm instead.
            images: None: the model takes text only.
        """
        x = self.embed(token_ids, adapters)
        if images is not None:
            images.place(x, 0)
        if self._position_table is not None:
            x = self._ops.add_rows(self._position_table(positions), x, 1.0)
        inputs = () if self._per_layer is None else (self._per_layer(token_ids, x, adapters),)
        x = x if self._streams is None else self._streams.expand(x, adapters)
        step = self.positions.inputs(positions, adapters, None if images is None else images.positions)
        stream = Stream(x)
        # Behind the last mixer only the rows with logits go on: in a prompt one of thousands.
        *layers, last = zip(self.layers, batches, caches, strict=True)
        for index, (layer, batch, cache) in enumerate(layers):
            stream = layer.feed_forward(*layer.mix_tokens(stream, step, batch, cache), *inputs, adapters=adapters)
            if images is not None and index < self._num_taps:
                plain = stream.after is None and stream.total is None
                assert plain, "such layers add their output as it is"
                images.place(stream.x, index + 1)
        layer, batch, cache = last
        mixed, residual = layer.mix_tokens(stream, step, batch, cache)
        assert residual is not None, "a model of one layer has a mixer"
        hidden = (mixed, residual, *inputs)
        return (self._finish(hidden, adapters),) if whole else hidden

    def embed(self, token_ids: A, adapters: AdapterRows | None = None) -> A:
        """`token_ids` [num_tokens] int64 -> the embeddings [num_tokens, hidden_size], scaled or normalized."""
        x, factor = self.embedding(token_ids), self.spec.embedding_multiplier
        if self._embedding_updates is not None and adapters is not None:
            self._embedding_updates.add(x, token_ids, adapters)
        x = x if self._embedding_norm is None else self._embedding_norm(x)
        return x if factor == 1.0 else self._ops.activate(x, None, factor=factor)

    def _finish(self, hidden: Iterable[A], adapters: AdapterRows | None) -> A:
        """The rest of the last layer and the final norm: [rows, hidden_size]."""
        stream = self.layers[-1].feed_forward(*hidden, adapters=adapters)
        if self._streams is not None:
            stream = Stream(self._streams.collapse(stream.x, adapters))
        normed, _ = self._residual.normed(stream, self.final_norm)
        return normed

    def compute_logits(self, hidden: Sequence[A], rows: A, adapters: AdapterRows | None = None) -> A:
        """The logits [len(rows), vocab_size] float32 of some rows: the rest of the last layer, the final norm, the
        projection to the vocabulary, and `scale_logits`.

        Args:
            hidden: the result of `forward`.
            rows: int64 indices of the step's tokens, in any order, possibly repeated.
            adapters: the LoRA adapters of these rows.
        """
        wanted = [self._ops.gather(part, rows) for part in hidden]
        normed = wanted[0] if len(wanted) == 1 else self._finish(wanted, adapters)
        return self.scale_logits(self.output.logits(normed, adapters))

    def scale_logits(self, logits: A) -> A:
        """Apply the spec's logits divisor and soft cap to the output projection's logits, in place."""
        if self.spec.logits_divisor != 1.0:
            logits = self._ops.activate(logits, None, divisor=self.spec.logits_divisor)
        cap = self.spec.logits_soft_cap
        return logits if cap is None else self._ops.activate(logits, "tanh", divisor=cap, factor=cap)

    def ignored_tensors(self) -> re.Pattern[str]:
        """A pattern of the checkpoint tensors that are not loaded: computed tables, copies of tied weights."""
        names = self.spec.names
        tied = (re.escape(f"{names.output}.weight"),) if self.spec.tie_embeddings else ()
        return re.compile("|".join((*names.ignored, *tied)))
