"""gpt-oss: attention sinks, a sliding window in every other layer; experts with biases and a clamped activation.

q, k, v = rope(Wq n + bq), rope(Wk n + bk), Wv n + bv                    n = norm(x)
x += Wo softmax([q kᵀ, sink]) v + bo            a logit of each head that belongs to no key; every other layer
n = norm(x)                                     over `sliding_window` keys
p = softmax(top_k(Wr n + br))
x += sum of p[e] * mlp_e(n)                     Wd ((u + 1) * g * sigmoid(1.702 g)) + bd, g and u clamped to 7
"""

from dataclasses import replace
from typing import Any

from penstock.layers.attention import AttentionSpec
from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The default for configs without RoPE settings."""


def gpt_oss_spec(config: HFConfig) -> ModelSpec:
    """Read a `GptOssForCausalLM`."""
    dense = read_dense(config, max_position=131072, head_dim=64, norm_eps=1e-5, theta=150000.0)
    config.expect("swiglu_alpha", 1.702)
    config.expect("swiglu_limit", 7.0)
    for repeated in ("experts_per_token", "initial_context_length"):  # the first checkpoints have these, too
        config.find(repeated, int)
    bias = config.get("attention_bias", True)
    rope, max_position = dense.attention.rope, dense.model.max_position
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        rope = config.rope_of(
            {**_ROPE, "rope_theta": config.positive("rope_theta", 150000.0)},
            dense.attention.head_dim,
            max_position,
        )
        max_position = rope.context(max_position)
    attention = replace(dense.attention, rope=rope, qkv_bias=bias, output_bias=bias, sinks=True)
    mixture = MixtureSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        read_routing(config, config.size("num_local_experts", 128), score="softmax_of_top"),
        activation="clamped_swiglu",
        bias=True,
        router_bias=True,
        transposed=True,
        interleaved=True,
        names=MixtureNames(router="mlp.router"),
    )
    attentions = _attentions(config, attention, dense.num_layers)
    layers = tuple(dense.layer(index, layer_attention, mixture) for index, layer_attention in enumerate(attentions))
    return replace(dense.model, layers=layers, max_position=max_position)


def _attentions(config: HFConfig, attention: AttentionSpec, num_layers: int) -> list[AttentionSpec]:
    window = config.size("sliding_window", 128)
    windows = config.layer_windows(num_layers, window, lambda index: index % 2 == 0)
    return [replace(attention, window=layer_window) for layer_window in windows]
