"""Hunyuan 3 (Hy3): norms of queries and keys, experts with sigmoid routing and a shared one after the first layer.

x += attention(norm(x))                         Llama's; q and k are normalised head by head
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + bias
x += scaling * (sum of s[e] / sum(s) * mlp_e(n)) + shared_mlp(n)         the first layer: mlp(n)
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import read_routing, sparse_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_NAMES = MixtureNames(router="mlp.router.gate", correction="mlp.expert_bias")


def hy_v3_spec(config: HFConfig) -> ModelSpec:
    """Read a `HYV3ForCausalLM`."""
    config.ignore("enable_moe_fp32_combine")
    dense = read_dense(
        config,
        max_position=131072,
        head_dim=128,
        num_kv_heads=8,
        norm_eps=1e-5,
        theta=11_158_840.0,
    )
    bias = config.get("attention_bias", False)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias, qk_norm_eps=dense.norm_eps)
    hidden, inner = dense.model.hidden_size, config.size("moe_intermediate_size", 1536)
    routing = read_routing(
        config,
        config.size("num_experts", 192),
        8,
        score="sigmoid",
        renormalize=True,
        epsilon=1e-20,
        scaling=config.positive("router_scaling_factor", 2.826),
    )
    mlp_bias = config.get("mlp_bias", False)
    shared = GatedMLPSpec(
        hidden,
        inner * config.size("num_shared_experts", 1),
        bias=mlp_bias,
        gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        down="mlp.shared_mlp.down_proj",
    )
    mixture = MixtureSpec(hidden, inner, routing, correction=True, shared=shared, names=_NAMES)
    mlp = replace(dense.mlp, bias=mlp_bias)
    sparse = sparse_layers(config, dense.num_layers, lambda index: index > 0)
    ignored = (*dense.model.names.ignored, rf"model\.layers\.{dense.num_layers}\..*")  # of multi-token prediction
    return replace(
        dense.model,
        layers=tuple(
            dense.layer(index, attention, mixture if has_experts else mlp) for index, has_experts in enumerate(sparse)
        ),
        names=replace(dense.model.names, ignored=ignored),
    )
