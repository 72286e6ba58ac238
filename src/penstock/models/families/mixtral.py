"""Mixtral: Mistral with experts instead of MLPs.

x += attention(norm(x))
n = norm(x)
p = top_k(softmax(Wr n)) / their sum
x += sum of p[e] * mlp_e(n)
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

NAMES = MixtureNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2")


def mixtral_spec(config: HFConfig) -> ModelSpec:
    """Read a `MixtralForCausalLM`."""
    config.get("router_jitter_noise", 0.0)  # used in training only
    dense = read_dense(config, max_position=4096 * 32, num_kv_heads=8, norm_eps=1e-5, theta=1e6)
    attention = replace(dense.attention, window=config.find_size("sliding_window"))
    routing = read_routing(config, config.size("num_local_experts", 8), renormalize=True)
    mixture = MixtureSpec(dense.model.hidden_size, dense.mlp.intermediate_size, routing, names=NAMES)
    layers = tuple(dense.layer(index, attention, mixture) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)
