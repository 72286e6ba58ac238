"""The dense decoder that every family so far is a configuration of."""

import re
from collections.abc import Callable, Sequence

from torch import Tensor

from penstock.kernels.attention import LayerCache
from penstock.kernels.batch import Batch
from penstock.layers.attention import Attention, AttentionNames, AttentionShape
from penstock.layers.embedding import Embedding, OutputHead
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary
from penstock.models.decoder_config import DecoderConfig
from penstock.models.model import FeedForward
from penstock.quantization.base import WeightFactory


def gated_mlp(config: DecoderConfig, factory: WeightFactory) -> FeedForward:
    """The feed-forward part of a dense layer."""
    names = config.names
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        factory,
        bias=config.mlp_bias,
        gate_up_names=names.gate_up,
        down_name=names.down,
    )


NewFeedForward = Callable[[DecoderConfig, WeightFactory], FeedForward]


class DecoderLayer:
    """Attention, then the feed-forward part, each after a norm and added to the residual stream.

    In two steps: what follows attention concerns each token alone.
    """

    def __init__(
        self, config: DecoderConfig, index: int, factory: WeightFactory, new_feed_forward: NewFeedForward
    ) -> None:
        shape = AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            sliding_window=config.sliding_windows[index],
            qkv_bias=config.qkv_bias,
            output_bias=config.attention_output_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
        )
        names = config.names
        attention_names = AttentionNames(names.qkv, names.attention_output, names.query_norm, names.key_norm)
        self._factor = config.residual_multiplier
        self.input_norm = RMSNorm(names.input_norm, config.hidden_size, config.norm_eps, factory)
        self.attention = Attention(attention_names, shape, factory)
        self.mlp_norm = RMSNorm(names.mlp_norm, config.hidden_size, config.norm_eps, factory)
        self.mlp = new_feed_forward(config, factory)

    def mix_tokens(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Tensor,
        batch: Batch,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """(what attention gives, for `feed_forward`; the residual stream [num_tokens, hidden_size])."""
        if residual is None:
            normed, residual = self.input_norm(x), x
        else:
            normed, residual = self.input_norm.after_adding(x, residual, self._factor)
        return self.attention.attend(normed, angles, batch, cache), residual

    def feed_forward(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what the feed-forward part gives, the residual stream to add it to); both [num_tokens, hidden_size].

        The sum is left to the next norm, which does it in the same pass.
        """
        projected = self.attention.output(attended)
        normed, residual = self.mlp_norm.after_adding(projected, residual, self._factor)
        return self.mlp(normed), residual


class Decoder:
    """Token ids in, logits out, over a paged KV cache. Weights are without content until the loader fills them.

    See `Model` for the methods.
    """

    def __init__(
        self,
        config: DecoderConfig,
        max_positions: int,
        factory: WeightFactory,
        new_feed_forward: NewFeedForward = gated_mlp,
    ) -> None:
        self.config = config
        self._ops = factory.ops
        names, tied = config.names, config.tie_embeddings
        table = (config.vocab_size, config.hidden_size)
        self.output = OutputHead(names.embedding if tied else names.output, *table, factory)
        self.embedding = self.output if tied else Embedding(names.embedding, *table, factory)
        self.rotary = Rotary(config.rope, max_positions, factory)
        self.layers = [
            DecoderLayer(config, index, factory.at(names.layer.format(index=index)), new_feed_forward)
            for index in range(config.num_layers)
        ]
        self.final_norm = RMSNorm(names.final_norm, config.hidden_size, config.norm_eps, factory)

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: Batch, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """What the last layer's `mix_tokens` gives: the rest is left to `lm_head`, for the wanted tokens alone."""
        x, residual = self.embedding(token_ids), None
        if self.config.embedding_multiplier != 1.0:
            x = self._ops.scale(x, self.config.embedding_multiplier)
        angles = self.rotary.angles(positions)
        *layers, last = zip(self.layers, caches, strict=True)
        for layer, cache in layers:
            x, residual = layer.feed_forward(*layer.mix_tokens(x, residual, angles, batch, cache))
        layer, cache = last
        return layer.mix_tokens(x, residual, angles, batch, cache)

    def compute_logits(self, hidden: Sequence[Tensor], rows: Tensor) -> Tensor:
        return self.scale_logits(self.lm_head(hidden, rows))

    def lm_head(self, hidden: Sequence[Tensor], rows: Tensor) -> Tensor:
        """The rest of the last layer, the last norm and the projection to the vocabulary."""
        attended, residual = (self._ops.gather(part, rows) for part in hidden)
        x, residual = self.layers[-1].feed_forward(attended, residual)
        normed, _ = self.final_norm.after_adding(x, residual, self.config.residual_multiplier)
        return self.output.logits(normed)

    def scale_logits(self, logits: Tensor) -> Tensor:
        return logits if self.config.logits_divisor == 1.0 else logits.div_(self.config.logits_divisor)

    def ignored_tensors(self) -> "re.Pattern[str]":
        """Names that a checkpoint may hold beside the parameters: what we compute, and the copy of a tied weight."""
        names = self.config.names
        tied = (re.escape(f"{names.output}.weight"),) if self.config.tie_embeddings else ()
        return re.compile("|".join((*names.ignored, *tied)))
