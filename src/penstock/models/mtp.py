"""Multi-token prediction (MTP): a head that drafts the token after the next (DeepSeek-AI, 2024, arXiv:2412.19437,
section 2.2).

    for the token t_p:      x = projection [ norm(embedding of t_p) | norm(hidden state of t_(p-1)) ]
    logits of t_(p+1):      lm_head(norm(layer(x))), where the layer has a KV cache of its own

The hidden states are the model's, after its final norm; for drafted tokens they are the head's own output of the step
before. The first token of a text has no predecessor, so its hidden state is zeros. The head shares the model's
embedding and output projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from penstock.kernels.array_types import A
from penstock.kernels.elementwise import Columns
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.models.decoder import Decoder, DecoderLayer, PositionTables
from penstock.models.spec import ModelSpec, MTPSpec
from penstock.models.stream import Residual, Stream

if TYPE_CHECKING:
    from penstock.kernels.batch import Batch
    from penstock.kernels.cache import AnyCache
    from penstock.quantization.base import WeightFactory


class MTPHead(Generic[A]):
    """The multi-token prediction head; see the module's docstring. The loader fills the weights."""

    def __init__(self, mtp: MTPSpec, target: Decoder[A], max_positions: int, factory: WeightFactory[A]) -> None:
        """
        Args:
            target: the model, whose embedding and output projection the head shares.
        """
        self.spec: ModelSpec = mtp.as_model(target.spec)
        hidden, factor = self.spec.hidden_size, self.spec.residual_multiplier
        self._target, self._ops = target, factory.ops
        self._embedding_norm = Norm(mtp.embedding_norm, factory)
        self._hidden_norm = Norm(mtp.hidden_norm, factory)
        self._projection = Linear(
            (mtp.projection,), 2 * hidden, (hidden,), factory, bias=False, gather_output=True, adaptable=False
        )
        self._layer = DecoderLayer(mtp.layer, factor, factory)
        self._residual = Residual(factor, factory.ops)
        self._norm = Norm(mtp.norm, factory)
        self.positions = PositionTables(self.spec, max_positions, factory)
        """Prepared for the step's positions before `mix_tokens`."""

    def mix_tokens(self, token_ids: A, positions: A, hidden: A, batch: Batch, cache: AnyCache[A] | None) -> tuple[A, A]:
        """Run the layer's mixer on the batch's tokens, and write its cache; returns the input of `finish`.

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64.
            hidden: [num_tokens, hidden_size], for each token the hidden state of its predecessor.
        """
        embedded, size, ops = self._target.embed(token_ids), hidden.shape[1], self._ops
        both = ops.empty_rows(hidden, (2 * size,), hidden.dtype)
        ops.copy_columns(self._embedding_norm(embedded), both, Columns(0, 0, size))
        ops.copy_columns(self._hidden_norm(hidden), both, Columns(0, size, size))
        stream = Stream(self._projection(both))
        step = self.positions.inputs(positions)
        mixed, residual = self._layer.mix_tokens(stream, step, batch, cache)
        assert residual is not None, "the head's layer has a mixer"
        return mixed, residual

    def finish(self, mixed: tuple[A, A], rows: A) -> A:
        """The head's hidden states [count, hidden_size], after its norm, of the rows [count] int64 (count >= 1)."""
        stream = self._layer.feed_forward(*(self._ops.gather(part, rows) for part in mixed))
        normed, _ = self._residual.normed(stream, self._norm)
        return normed

    def logits(self, normed: A) -> A:
        """`normed`, the result of `finish` -> logits [count, vocab_size] float32."""
        return self._target.scale_logits(self._target.output.logits(normed))
