"""IBM's Granite with sliding windows, dense and mixtures of experts: attention sinks, a RoPE base for each layer.

x = embedding_multiplier * embedding
x += residual_multiplier * attention(norm(x))   three of four layers: over `sliding_window` keys; each head has a sink
x += residual_multiplier * mlp(norm(x))         or Granite-MoE's experts

logits = W norm(x) / logits_scaling
"""

from dataclasses import replace

from penstock.layers.attention import AttentionSpec
from penstock.layers.mixture import MixtureNames
from penstock.layers.spec import MixerSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.granite import granite_model
from penstock.models.families.granite_moe import granite_mixture
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_EXPERT_NAMES = MixtureNames(router="block_sparse_moe.router", experts="block_sparse_moe.experts")


def granite_swa_spec(config: HFConfig) -> ModelSpec:
    """Read a `GraniteSWAForCausalLM`."""
    dense = read_dense(config, max_position=8192, num_kv_heads=4, norm_eps=1e-5, tied=True)
    mlp = replace(dense.mlp, bias=config.get("mlp_bias", False))
    return granite_model(config, dense, _attentions(config, dense), mlp)


def granite_moe_swa_spec(config: HFConfig) -> ModelSpec:
    """Read a `GraniteMoeSWAForCausalLM`."""
    dense = read_dense(config, max_position=2048)
    mixture = granite_mixture(config, dense, shared=config.size("shared_intermediate_size", 0, least=0))
    mixture = replace(mixture, names=_EXPERT_NAMES)
    return granite_model(config, dense, _attentions(config, dense), mixture)


def _attentions(config: HFConfig, dense: Dense) -> list[MixerSpec]:
    bias = config.get("attention_bias", False)
    attention = replace(
        dense.attention,
        scale=config.positive("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
    )
    window = config.find_size("sliding_window", absent=128)
    windows = config.layer_windows(dense.num_layers, window, lambda index: index % 4 > 0)
    thetas = config.by_layer("layer_rope_theta", dense.num_layers)
    return [
        _turned(config, replace(attention, window=window), theta) for window, theta in zip(windows, thetas, strict=True)
    ]


def _turned(config: HFConfig, attention: AttentionSpec, theta: object) -> AttentionSpec:
    """The attention with a layer's `layer_rope_theta`: None is the common one, 0 no RoPE."""
    if theta is None or attention.rope is None:
        return attention
    value = config.section({"layer_rope_theta": theta}).positive("layer_rope_theta", 0.0, or_zero=True)
    return replace(attention, rope=replace(attention.rope, theta=value) if value else None)
