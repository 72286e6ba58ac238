"""The decoder that every family is a list of layers for."""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.kernels.batch import Batch
from penstock.kernels.cache import AnyCache
from penstock.kernels.lora.rows import AdapterRows
from penstock.layers.embedding import Embedding, OutputHead
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary, Temperatures
from penstock.layers.spec import StepInputs
from penstock.models.spec import Branch, LayerSpec, ModelSpec
from penstock.quantization.base import WeightFactory


class BranchNorms:
    """The norms before and after a part of a layer, of which either may be missing."""

    def __init__(self, branch: Branch[Any], factor: float, factory: WeightFactory) -> None:
        self._before = None if branch.norm is None else RMSNorm(branch.norm, factory)
        self._after = None if branch.norm_after is None else RMSNorm(branch.norm_after, factory)
        self._factor, self._ops = factor, factory.ops

    def before(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(what the part takes, the residual stream), both [num_tokens, hidden_size].

        `x`: what is to be added to `residual`, which is then given up; or, without that, the residual stream itself.
        """
        if residual is None:
            return (x if self._before is None else self._before(x)), x
        if self._before is None:
            total = self._ops.add_rows(x, residual, self._factor)
            return total, total
        return self._before.after_adding(x, residual, self._factor)

    def after(self, x: Tensor) -> Tensor:
        """What is to be added to the residual stream, of what the part gives."""
        return x if self._after is None else self._after(x)


class DecoderLayer:
    """A mixer, then a feed-forward part, each with its norms and added to the residual stream; one may be missing.

    In two steps: what follows the mixing of tokens concerns each token alone.
    """

    def __init__(self, spec: LayerSpec, factor: float, factory: WeightFactory) -> None:
        """
        Args:
            factor: on what each part adds to the residual stream.
        """
        factory = factory.at(spec.name)
        self._mixer = self._feed_forward = None
        if spec.mixer is not None:
            self._mixer_norms = BranchNorms(spec.mixer, factor, factory)
            self._mixer = spec.mixer.part.build(factory)
        if spec.feed_forward is not None:
            self._feed_forward_norms = BranchNorms(spec.feed_forward, factor, factory)
            self._feed_forward = spec.feed_forward.part.build(factory)

    def mix_tokens(
        self,
        x: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        batch: Batch,
        cache: AnyCache | None,
    ) -> tuple[Tensor, Tensor]:
        """(what the mixer gives, for `feed_forward`; the residual stream [num_tokens, hidden_size]).

        `x`: what the layer before hands on, to be added to `residual`; or, without that, the residual stream itself.
        """
        if self._mixer is None:
            assert residual is not None, "the first layer of a model mixes tokens"
            return x, residual
        taken, residual = self._mixer_norms.before(x, residual)
        return self._mixer.mix(taken, step, batch, cache), residual

    def feed_forward(
        self, mixed: Tensor, residual: Tensor, adapters: AdapterRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """(what the layer hands on, the residual stream to add it to); both [num_tokens, hidden_size].

        `adapters`: those that the tokens have.
        The sum is left to the next norm, which does it in the same pass.
        """
        x = mixed if self._mixer is None else self._mixer_norms.after(self._mixer.output(mixed, adapters))
        if self._feed_forward is None:
            return x, residual
        taken, residual = self._feed_forward_norms.before(x, residual)
        return self._feed_forward_norms.after(self._feed_forward(taken, adapters)), residual


class PositionTables:
    """What layers are given of the positions of a step's tokens."""

    def __init__(self, spec: ModelSpec, max_positions: int, factory: WeightFactory) -> None:
        self._rotaries = {rope: Rotary(rope, max_positions, factory) for rope in spec.ropes}
        self._temperatures = {one: Temperatures(one, max_positions, factory) for one in spec.temperatures}

    def inputs(self, positions: Tensor, adapters: AdapterRows | None = None) -> StepInputs:
        """Those of `positions` [num_tokens] int64, with the tokens' adapters."""
        return StepInputs(
            positions,
            {rope: rotary.angles(positions) for rope, rotary in self._rotaries.items()},
            {one: temperatures.at(positions) for one, temperatures in self._temperatures.items()},
            adapters,
        )


class Decoder:
    """Token ids in, logits out, over a paged KV cache. Weights are without content until the loader fills them.

    `forward` and `lm_head` are called once with recorded tensors, too, which have no content: neither may branch on
    what a tensor holds, or on how many rows it has.
    """

    def __init__(self, spec: ModelSpec, max_positions: int, factory: WeightFactory) -> None:
        """
        Args:
            max_positions: tokens of the longest text.
        """
        self.spec = spec
        self._ops = factory.ops
        names, tied = spec.names, spec.tie_embeddings
        table = (spec.vocab_size, spec.hidden_size)
        self.output = OutputHead(names.embedding if tied else names.output, *table, factory)
        self.embedding = self.output if tied else Embedding(names.embedding, *table, factory)
        self._positions = PositionTables(spec, max_positions, factory)
        self.layers = [DecoderLayer(layer, spec.residual_multiplier, factory) for layer in spec.layers]
        self.final_norm = RMSNorm(spec.final_norm, factory)
        self.adapted = factory.adapted

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batches: Sequence[Batch],
        caches: Sequence[AnyCache | None],
        adapters: AdapterRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute a step's tokens and store what the layers keep of them.

        `token_ids` and `positions` [num_tokens] int64; `batches` and `caches` one a layer; `adapters`
        those of the tokens. Returns what the last
        layer's `mix_tokens` gives: the rest is left to `lm_head`, for the wanted tokens alone.
        """
        x, residual = self.embedding(token_ids), None
        if self.spec.embedding_multiplier != 1.0:
            x = self._ops.scale(x, self.spec.embedding_multiplier)
        step = self._positions.inputs(positions, adapters)
        *layers, last = zip(self.layers, batches, caches, strict=True)
        for layer, batch, cache in layers:
            x, residual = layer.feed_forward(*layer.mix_tokens(x, residual, step, batch, cache), adapters)
        layer, batch, cache = last
        return layer.mix_tokens(x, residual, step, batch, cache)

    def compute_logits(self, hidden: Sequence[Tensor], rows: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """`lm_head`, then `scale_logits`."""
        return self.scale_logits(self.lm_head(hidden, rows, adapters))

    def lm_head(self, hidden: Sequence[Tensor], rows: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """The rest of the last layer, the last norm and the projection to the vocabulary.

        `hidden` is what `forward` gave; `rows` int64, of the step, in any order and repeated at will;
        `adapters` those of these rows. Returns [len(rows), vocab_size] float32.
        """
        last = self.layers[-1]
        mixed, residual = (self._ops.gather(part, rows) for part in hidden)
        x, residual = last.feed_forward(mixed, residual, adapters)
        normed, _ = self.final_norm.after_adding(x, residual, self.spec.residual_multiplier)
        return self.output.logits(normed)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The logits of what `lm_head` gives, in place."""
        if self.spec.logits_divisor != 1.0:
            logits = logits.div_(self.spec.logits_divisor)
        cap = self.spec.logits_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def ignored_tensors(self) -> "re.Pattern[str]":
        """Names that a checkpoint may hold beside the parameters: what we compute, and the copy of a tied weight."""
        names = self.spec.names
        tied = (re.escape(f"{names.output}.weight"),) if self.spec.tie_embeddings else ()
        return re.compile("|".join((*names.ignored, *tied)))
