"""Granite 3 (dense), HyperCLOVA X SEED: Llama with factors on embeddings, scores, residual branches and logits.

x = embedding_multiplier * embedding
x += residual_multiplier * attention(norm(x))   scores are multiplied by attention_multiplier
x += residual_multiplier * mlp(norm(x))

logits = W norm(x) / logits_scaling             HyperCLOVA X: times logits_scaling, and norms after the parts
"""

from dataclasses import replace

from penstock.layers.spec import FeedForwardSpec, MixerSpec
from penstock.models.families.dense import Dense
from penstock.models.families.llama import llama_parts
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec


def granite_spec(config: HFConfig) -> ModelSpec:
    """Read a `GraniteForCausalLM`."""
    dense = llama_parts(config)
    attention = replace(dense.attention, scale=config.positive("attention_multiplier", 1.0))
    return granite_model(config, dense, [attention] * dense.num_layers, dense.mlp)


def hyperclovax_spec(config: HFConfig) -> ModelSpec:
    """Read a `HyperCLOVAXForCausalLM`."""
    dense = llama_parts(config)
    attention = replace(dense.attention, scale=config.positive("attention_multiplier", dense.attention.scale))
    model = granite_model(config, dense, [attention] * dense.num_layers, dense.mlp)
    model = replace(model, logits_divisor=1.0 / model.logits_divisor)
    if not config.get("use_post_norm", True):
        return model

    def with_norms_after(layer: LayerSpec) -> LayerSpec:
        assert layer.mixer is not None
        assert layer.feed_forward is not None
        return replace(
            layer,
            mixer=replace(layer.mixer, norm_after=dense.norm("post_norm1")),
            feed_forward=replace(layer.feed_forward, norm_after=dense.norm("post_norm2")),
        )

    return replace(model, layers=tuple(map(with_norms_after, model.layers)))


def granite_model(config: HFConfig, dense: Dense, mixers: list[MixerSpec], feed_forward: FeedForwardSpec) -> ModelSpec:
    """A model of these mixers, all with the same feed-forward part, with Granite's scaling factors."""
    return replace(
        dense.model,
        layers=tuple(dense.layer(index, mixer, feed_forward) for index, mixer in enumerate(mixers)),
        embedding_multiplier=config.positive("embedding_multiplier", 1.0),
        residual_multiplier=config.positive("residual_multiplier", 1.0),
        logits_divisor=config.positive("logits_scaling", 1.0),
    )
