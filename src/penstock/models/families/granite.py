"""IBM's Granite 3 (dense): Llama with scaling factors on embeddings, scores, residual branches and logits.

x = embedding_multiplier * embedding
x += residual_multiplier * attention(norm(x))   scores are multiplied by attention_multiplier
x += residual_multiplier * mlp(norm(x))

logits = W norm(x) / logits_scaling
"""

from dataclasses import replace

from penstock.layers.spec import FeedForwardSpec, MixerSpec
from penstock.models.families.dense import Dense
from penstock.models.families.llama import llama_parts
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def granite_spec(config: HFConfig) -> ModelSpec:
    """Read a `GraniteForCausalLM`."""
    dense = llama_parts(config)
    attention = replace(dense.attention, scale=config.positive("attention_multiplier", 1.0))
    return granite_model(config, dense, [attention] * dense.num_layers, dense.mlp)


def granite_model(config: HFConfig, dense: Dense, mixers: list[MixerSpec], feed_forward: FeedForwardSpec) -> ModelSpec:
    """A model of these mixers, all with the same feed-forward part, with Granite's scaling factors."""
    return replace(
        dense.model,
        layers=tuple(dense.layer(index, mixer, feed_forward) for index, mixer in enumerate(mixers)),
        embedding_multiplier=config.positive("embedding_multiplier", 1.0),
        residual_multiplier=config.positive("residual_multiplier", 1.0),
        logits_divisor=config.positive("logits_scaling", 1.0),
    )
