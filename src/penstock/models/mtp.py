"""Multi-token prediction: a head that guesses the token after the next, from what the model made of the one before
(DeepSeek-AI, 2024, arXiv:2412.19437, section 2.2).

    of the token t_p      x = projection [ norm(embedding of t_p) | norm(hidden state of t_(p-1)) ]
    a layer of the model, over what it keeps of the tokens so far; the model's projection to the vocabulary -> t_(p+1)

The hidden states are the model's, after its last norm; of tokens that are guesses themselves, what the head made of the
guess before. The first token of a text has none before it: zeros. Embedding and projection to the vocabulary are the
model's own.
"""

import torch
from torch import Tensor

from penstock.kernels.batch import Batch
from penstock.kernels.cache import AnyCache
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.models.decoder import Decoder, DecoderLayer, PositionTables, Residual, Stream
from penstock.models.spec import ModelSpec, MTPSpec
from penstock.quantization.base import WeightFactory


class MTPHead:
    """See the module's docstring. Weights are without content until the loader fills them."""

    def __init__(self, mtp: MTPSpec, target: Decoder, max_positions: int, factory: WeightFactory) -> None:
        """
        Args:
            target: whose embedding and output projection it takes.
        """
        self.spec: ModelSpec = mtp.as_model(target.spec)
        hidden, factor = self.spec.hidden_size, self.spec.residual_multiplier
        self._target, self._ops = target, factory.ops
        self._embedding_norm = Norm(mtp.embedding_norm, factory)
        self._hidden_norm = Norm(mtp.hidden_norm, factory)
        self._projection = Linear((mtp.projection,), 2 * hidden, (hidden,), factory, bias=False, gives_all=True)
        self._layer = DecoderLayer(mtp.layer, factor, factory)
        self._residual = Residual(factor, factory.ops)
        self._norm = Norm(mtp.norm, factory)
        self._positions = PositionTables(self.spec, max_positions, factory)

    def mix_tokens(self, hidden: Tensor, batch: Batch, cache: AnyCache | None) -> tuple[Tensor, Tensor]:
        """Compute the batch's tokens and store what the layer keeps of them; what `finish` takes.

        `hidden` [num_tokens, hidden_size] is that of the token before each.
        """
        embedded = self._target.embed(batch.tensor("token_ids"))
        both = (self._embedding_norm(embedded), self._hidden_norm(hidden))
        stream = Stream(self._projection(torch.cat(both, 1)))
        step = self._positions.inputs(batch.tensor("positions"))
        return self._layer.mix_tokens(stream, step, batch, cache)

    def finish(self, mixed: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        """What the head makes of these rows [count] int64, one or more, after its norm: [count, hidden_size]."""
        stream = self._layer.feed_forward(*(self._ops.gather(part, rows) for part in mixed))
        normed, _ = self._residual.normed(stream, self._norm)
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        """The logits of the result of `finish` -> [count, vocab_size] float32."""
        return self._target.scale_logits(self._target.output.logits(normed))
