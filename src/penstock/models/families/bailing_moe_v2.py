"""Ling 2 and Ring 2 (mini, flash, 1T): GLM 4.5's parts, with a fused projection and norms of queries and keys.

x += attention(norm(x))                         q and k are normalised head by head; RoPE on half of each head
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + bias, in the best groups
x += scaling * (sum of s[e] / sum(s) * mlp_e(n)) + shared_mlp(n)         the first layers: mlp(n)
"""

from dataclasses import replace

from penstock.layers.attention import AttentionNames
from penstock.layers.mixture import MixtureNames
from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import sigmoid_mixture
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelNames, ModelSpec

_NAMES = AttentionNames(
    qkv=("attention.query_key_value",),
    output="attention.dense",
    query_norm="attention.query_layernorm",
    key_norm="attention.key_layernorm",
)


def bailing_moe_v2_spec(config: HFConfig) -> ModelSpec:
    """Read a `BailingMoeV2ForCausalLM`."""
    config.ignore("router_dtype", "output_dropout", "mtp_loss_scaling_factor", "moe_shared_expert_intermediate_size")
    config.expect("score_function", "sigmoid", None)
    config.expect("moe_router_enable_expert_bias", True)
    config.expect("norm_head", False)
    config.expect("use_rmsnorm", True)
    config.expect("use_sliding_window", False, None)
    dense = read_dense(
        config,
        max_position=32768,
        head_dim=128,
        num_kv_heads=4,
        theta=600000.0,
        partial_rotary=config.size("rotary_dim", 64) / config.size("head_dim", 128),
    )
    attention = replace(
        dense.attention,
        qkv_bias=config.get("use_qkv_bias", False),
        output_bias=config.get("use_bias", False),
        qk_norm_eps=dense.norm_eps if config.get("use_qk_norm", True) else None,
        names=_NAMES,
    )
    mixture = sigmoid_mixture(
        config,
        dense.model.hidden_size,
        experts=("num_experts", 256),
        top_k=8,
        shared=("num_shared_experts", 1),
        inner=512,
        scaling=2.5,
        groups=(8, 4),
    )
    mixture = replace(mixture, names=MixtureNames(correction="mlp.gate.expert_bias"))
    first = config.size("first_k_dense_replace", 1, least=0)
    mtp_layers = config.size("num_nextn_predict_layers", 0, least=0)
    mtp_tensors = (rf"model\.layers\.{dense.num_layers + index}\..*" for index in range(mtp_layers))
    return replace(
        dense.model,
        layers=tuple(
            dense.layer(index, attention, mixture if index >= first else None) for index in range(dense.num_layers)
        ),
        names=ModelNames("model.word_embeddings", ignored=(*ModelNames().ignored, *mtp_tensors)),
    )
