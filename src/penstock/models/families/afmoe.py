"""Arcee's Trinity (Nano, Mini, Large): gated attention, norms before and after each part, experts.

q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); q and k are normalised head by head
x += norm(Wo (attend(q, k, v) * sigmoid(Wg n))) three of four layers: a sliding window, and only these RoPE
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + bias
x += norm(scaling * sum of s[e] / sum(s) * mlp_e(n) + shared_mlp(n))     the first layers: norm(mlp(n))
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import read_routing, shared_experts
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer

_NAMES = MixtureNames(router="mlp.router.gate", correction="mlp.expert_bias")


def afmoe_spec(config: HFConfig) -> ModelSpec:
    """Read an `AfmoeForCausalLM`."""
    config.ignore("load_balance_coeff", "use_grouped_mm")
    config.expect("score_func", "sigmoid")
    config.expect("route_norm", True)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        config.expect(key, 1, None)
    dense = read_dense(config, max_position=16384, head_dim=128, norm_eps=1e-5)
    bias = config.get("attention_bias", False)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias, qk_norm_eps=dense.norm_eps, column_gates=True)
    every = config.size("global_attn_every_n_layers", 4)
    window = config.size("sliding_window", 1024)
    windows = config.layer_windows(dense.num_layers, window, lambda index: (index + 1) % every > 0)
    mixture, plain = _mixture(config, dense.model.hidden_size), config.size("num_dense_layers", 1, least=0)

    def layer(index: int, window: int | None) -> LayerSpec:
        mixer = replace(attention, window=window, rope=None if window is None else attention.rope)
        part = mixture if index >= plain else dense.mlp
        return LayerSpec(
            f"model.layers.{index}",
            SubLayer(mixer, dense.norm("input_layernorm"), dense.norm("post_attention_layernorm")),
            SubLayer(part, dense.norm("pre_mlp_layernorm"), dense.norm("post_mlp_layernorm")),
        )

    return replace(
        dense.model,
        layers=tuple(layer(index, one) for index, one in enumerate(windows)),
        embedding_multiplier=dense.model.hidden_size**0.5 if config.get("mup_enabled", False) else 1.0,
    )


def _mixture(config: HFConfig, hidden: int) -> MixtureSpec:
    routing = read_routing(
        config,
        config.size("num_experts", 64),
        6,
        score="sigmoid",
        renormalize=True,
        epsilon=1e-20,
        scaling=config.positive("route_scale", 1.0),
    )
    inner = config.size("moe_intermediate_size", 1408)
    shared = shared_experts(hidden, inner * config.size("num_shared_experts", 2))
    return MixtureSpec(hidden, inner, routing, correction=True, shared=shared, names=_NAMES)
