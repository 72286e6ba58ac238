"""The dense decoder that every family so far is a configuration of."""

import re
from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.gather import gather
from penstock.kernels.kv_store import LayerCache
from penstock.kernels.paged_attention import Batch
from penstock.kernels.scale import scale
from penstock.layers.attention import Attention, AttentionShape
from penstock.layers.embedding import Embedding, OutputHead
from penstock.layers.mlp import GatedMLP
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary
from penstock.models.decoder_config import DecoderConfig, WeightNames
from penstock.quantization.base import Parameter, Storage


class DecoderLayer:
    """Attention, then the MLP, each after a norm and added to the residual stream.

    In two parts: what follows attention concerns each token alone.
    """

    def __init__(self, config: DecoderConfig, index: int, storage: Storage) -> None:
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
        self._factor = config.residual_multiplier
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, storage)
        self.attention = Attention(shape, storage)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, storage)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, storage, bias=config.mlp_bias)

    def attend(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Tensor,
        batch: Batch,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """(what attention gives, for `finish`; the residual stream [num_tokens, hidden_size])."""
        if residual is None:
            normed, residual = self.input_norm(x), x
        else:
            normed, residual = self.input_norm.after_adding(x, residual, self._factor)
        return self.attention.attend(normed, angles, batch, cache), residual

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what the MLP gives, the residual stream that is to be added to); both [num_tokens, hidden_size].

        The sum is left to the next norm, which does it in the same pass.
        """
        projected = self.attention.output(attended)
        normed, residual = self.mlp_norm.after_adding(projected, residual, self._factor)
        return self.mlp(normed), residual

    def parameters(self, names: WeightNames) -> dict[str, Parameter]:
        """What the checkpoint holds of the layer, by the names within the layer."""
        attention = self.attention
        named = {
            **self.input_norm.parameters(names.input_norm),
            **self.mlp_norm.parameters(names.mlp_norm),
            **attention.qkv.parameters(names.qkv),
            **attention.output.parameters((names.attention_output,)),
            **self.mlp.gate_up.parameters(names.gate_up),
            **self.mlp.down.parameters((names.down,)),
        }
        if attention.query_norm is not None and attention.key_norm is not None:
            named |= attention.query_norm.parameters(names.query_norm)
            named |= attention.key_norm.parameters(names.key_norm)
        return named


class Decoder:
    """Token ids in, logits out, over a paged KV cache. Weights are without content until the loader fills them."""

    def __init__(self, config: DecoderConfig, max_positions: int, storage: Storage) -> None:
        self.config = config
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.output = OutputHead(vocab_size, hidden_size, storage)
        tied = config.tie_embeddings
        self.embedding = self.output if tied else Embedding(vocab_size, hidden_size, storage)
        self.rotary = Rotary(config.rope, max_positions, storage.device)
        self.layers = [DecoderLayer(config, index, storage) for index in range(config.num_layers)]
        self.final_norm = RMSNorm(hidden_size, config.norm_eps, storage)

    def attend(
        self, token_ids: Tensor, positions: Tensor, batch: Batch, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """Compute a step's tokens, store their keys and values: what the last layer's `attend` gives.

        `token_ids` and `positions` [num_tokens] int64; `caches` one a layer. The rest of the last layer is left to
        `logits`, for the tokens alone whose logits are wanted.
        """
        x, residual = self.embedding(token_ids), None
        if self.config.embedding_multiplier != 1.0:
            x = scale(x, self.config.embedding_multiplier)
        angles = self.rotary.angles(positions)
        *layers, last = zip(self.layers, caches, strict=True)
        for layer, cache in layers:
            x, residual = layer.finish(*layer.attend(x, residual, angles, batch, cache))
        layer, cache = last
        return layer.attend(x, residual, angles, batch, cache)

    def logits(self, attended: Tensor, residual: Tensor, sampled_rows: Tensor) -> Tensor:
        """[num_samples, vocab_size] float32 of what `attend` returned.

        `sampled_rows` [num_samples] int64, rows of the step, in any order and repeated at will.
        """
        return self.scale_logits(self.project(attended, residual, sampled_rows))

    def project(self, attended: Tensor, residual: Tensor, sampled_rows: Tensor) -> Tensor:
        """The rest of the last layer, the last norm and the projection to the vocabulary."""
        x, residual = self.layers[-1].finish(gather(attended, sampled_rows), gather(residual, sampled_rows))
        normed, _ = self.final_norm.after_adding(x, residual, self.config.residual_multiplier)
        return self.output.logits(normed)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """What `project` gives, in place, as the model means it."""
        return logits if self.config.logits_divisor == 1.0 else logits.div_(self.config.logits_divisor)

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor that the checkpoint must hold, by its name."""
        names = self.config.names
        named = self.embedding.parameters(names.embedding) | self.final_norm.parameters(names.final_norm)
        if self.output is not self.embedding:
            named |= self.output.parameters(names.output)
        for index, layer in enumerate(self.layers):
            prefix = names.layer.format(index=index)
            named |= {prefix + name: parameter for name, parameter in layer.parameters(names).items()}
        return named

    def ignored_tensors(self) -> "re.Pattern[str]":
        """Names that a checkpoint may hold beside the parameters: what we compute, and the copy of a tied weight."""
        names = self.config.names
        tied = (re.escape(f"{names.output}.weight"),) if self.config.tie_embeddings else ()
        return re.compile("|".join((*names.ignored, *tied)))
