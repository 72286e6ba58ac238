"""OLMoE: norms over all query and key heads, and experts instead of MLPs.

q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); q and k are normalised over all heads together
x += Wo attend(rope(q), rope(k), v)             q, k and v may be limited in size first
n = norm(x)
p = top_k(softmax(Wr n))
x += sum of p[e] * mlp_e(n)
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def olmoe_spec(config: HFConfig) -> ModelSpec:
    """Read an `OlmoeForCausalLM`."""
    dense = read_dense(config, max_position=4096, norm_eps=1e-5)
    bias = config.get("attention_bias", False)
    attention = replace(
        dense.attention, qkv_bias=bias, output_bias=bias, qk_norm_eps=dense.norm_eps, qk_norm_whole=True
    )
    if config.has("clip_qkv"):
        attention = replace(attention, qkv_clip=config.positive("clip_qkv", 1.0))
    config.is_null("clip_qkv")
    experts = config.find_size("num_experts") or config.size("num_local_experts", 64)
    routing = read_routing(config, experts, renormalize=config.get("norm_topk_prob", False))
    mixture = MixtureSpec(dense.model.hidden_size, dense.mlp.intermediate_size, routing)
    layers = tuple(dense.layer(index, attention, mixture) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)
