"""Tencent's Hunyuan (0.5B to 7B, A13B): norms of query and key heads after RoPE; A13B: experts and a shared expert.

q, k, v = Wq n, Wk n, Wv n                      n = norm(x)
x += Wo attend(norm(rope(q)), norm(rope(k)), v)                          head by head
n = norm(x)
p = top_k(softmax(Wr n)) / their sum
x += sum of p[e] * mlp_e(n) + shared_mlp(n)     dense models: mlp(n)
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames
from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.rope import RopeConfig
from penstock.models.families.dense import Dense, check_rotation, read_dense
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_ATTENTION_NAMES = AttentionNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
_EXPERT_NAMES = MixtureNames(router="mlp.gate.wg")
_ROPES = ("default", "linear", "llama3", "frequency_factors")


def hunyuan_dense_spec(config: HFConfig) -> ModelSpec:
    """Read a `HunYuanDenseV1ForCausalLM`."""
    dense = _dense(config)
    return replace(dense.model, layers=tuple(dense.layer(index) for index in range(dense.num_layers)))


def hunyuan_moe_spec(config: HFConfig) -> ModelSpec:
    """Read a `HunYuanMoEV1ForCausalLM`."""
    dense = _dense(config)
    hidden, inner = dense.model.hidden_size, dense.mlp.intermediate_size
    experts = config.size("num_experts", 1)
    shared = GatedMLPSpec(
        hidden,
        inner,
        gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        down="mlp.shared_mlp.down_proj",
    )
    routings = (
        read_routing(config.section({"moe_topk": top_k}), experts, 1, top_k_key="moe_topk", renormalize=True)
        for top_k in config.by_layer("moe_topk", dense.num_layers)
    )
    layers = (
        dense.layer(index, None, MixtureSpec(hidden, inner, routing, shared=shared, names=_EXPERT_NAMES))
        for index, routing in enumerate(routings)
    )
    return replace(dense.model, layers=tuple(layers))


def _dense(config: HFConfig) -> Dense:
    dense = read_dense(config, max_position=2048, norm_eps=1e-5, reads_rope=False)
    bias, head_dim = config.get("attention_bias", False), dense.attention.head_dim
    attention = replace(
        dense.attention,
        rope=_rope(config, head_dim, dense.model.max_position),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_eps=dense.norm_eps,
        qk_norm_last=True,
        names=_ATTENTION_NAMES,
    )
    return replace(dense, attention=attention)


def _rope(config: HFConfig, head_dim: int, max_position: int) -> RopeConfig:
    """The RoPE config; the type `dynamic` with an `alpha` raises theta, whatever the length."""
    common = {"rope_theta": config.positive("rope_theta", 10000.0)}
    given = common | config.rope_settings(common)
    section = config.section(given)
    if (section.find("rope_type", str) or section.get("type", "default")) == "dynamic" and section.has("alpha"):
        alpha = section.positive("alpha", 1.0)
        given = {"rope_theta": section.positive("rope_theta", 10000.0) * alpha ** (head_dim / max(head_dim - 2, 1))}
    rope = config.rope_of(given, head_dim, max_position)
    if rope.type not in _ROPES:  # the norms after RoPE would cancel other types' factor on cosines and sines
        raise config.unsupported("rope type", rope.type, _ROPES)
    check_rotation(rope, head_dim, config)
    return rope
