"""ERNIE 4.5 mixtures of experts (21B-A3B, 300B-A47B): ERNIE 4.5 with experts and shared experts in most layers.

x += attention(norm(x))                         ERNIE 4.5's, with interleaved RoPE
n = norm(x)
p = softmax(Wr n)                               the experts are chosen by p + correction
x += sum of p[e] / sum(p) * mlp_e(n) + shared_mlp(n)                     the first layers: mlp(n)
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import read_routing, shared_experts
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_NAMES = MixtureNames(correction="mlp.moe_statics.e_score_correction_bias")


def ernie4_5_moe_spec(config: HFConfig) -> ModelSpec:
    """Read an `Ernie4_5_MoeForCausalLM`."""
    config.expect("moe_use_aux_free", True)
    dense = read_dense(config, max_position=131072, num_kv_heads=4, norm_eps=1e-5, theta=500000.0, tied=True)
    bias = config.get("use_bias", False)
    attention = replace(dense.attention, interleaved_rope=True, qkv_bias=bias, output_bias=bias)
    mlp, mixture = replace(dense.mlp, bias=bias), _mixture(config, dense.model.hidden_size, bias=bias)
    first = config.size("moe_layer_start_index", 1, least=0)
    last = config.size("moe_layer_end_index", -1, least=-1)
    interval = config.size("moe_layer_interval", 1)
    last = dense.num_layers - 1 if last == -1 else last
    layers = tuple(
        dense.layer(index, attention, mixture if first <= index <= last and (index + 1) % interval == 0 else mlp)
        for index in range(dense.num_layers)
    )
    return replace(dense.model, layers=layers, output_bias=bias)


def _mixture(config: HFConfig, hidden_size: int, *, bias: bool) -> MixtureSpec:
    experts, inner = config.size("moe_num_experts", 64), config.size("moe_intermediate_size", 1536)
    routing = read_routing(config, experts, 6, top_k_key="moe_k", renormalize=True)
    least = config.positive("moe_norm_min", 1e-12, or_zero=True)
    if least > routing.top_k / experts:  # the sum of the largest probabilities is never less
        raise config.unsupported(
            "moe_norm_min", least, ("numbers up to moe_k / moe_num_experts, which have no effect",)
        )
    shared = config.size("moe_num_shared_experts", 2, least=0)
    return MixtureSpec(
        hidden_size,
        inner,
        routing,
        correction=True,
        shared=replace(shared_experts(hidden_size, inner * shared), bias=bias) if shared else None,
        names=_NAMES,
    )
