"""GLM 4.5 to 4.7, Solar Open: sigmoid routing with a correction bias, a shared expert, RoPE on half of each head.

x += attention(norm(x))                         RoPE on half of each head, Solar: on all; q and k may have norms
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + correction, in the best groups
x += scaling * (sum of s[e] / sum(s) * mlp_e(n)) + shared_mlp(n)         the first layers: mlp(n)
"""

from dataclasses import replace

from penstock.layers.attention import AttentionSpec
from penstock.models.families.dense import Dense, nextn_head, read_dense
from penstock.models.families.mixtures import sigmoid_mixture
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def glm4_moe_spec(config: HFConfig) -> ModelSpec:
    """Read a `Glm4MoeForCausalLM`."""
    dense = read_dense(config, max_position=131072, partial_rotary=0.5, norm_eps=1e-5)
    attention = _attention(config, dense)
    mixture = sigmoid_mixture(
        config,
        dense.model.hidden_size,
        experts=("n_routed_experts", 128),
        shared=("n_shared_experts", 1),
        inner=1408,
    )
    first = config.size("first_k_dense_replace", 1, least=0)
    layers = tuple(
        dense.layer(index, attention, mixture if index >= first else None) for index in range(dense.num_layers)
    )
    num_mtp_layers = config.size("num_nextn_predict_layers", 0, least=0)
    mtp_tensors = (rf"model\.layers\.{dense.num_layers + index}\..*" for index in range(num_mtp_layers))
    names = replace(dense.model.names, ignored=(*dense.model.names.ignored, *mtp_tensors))
    head = nextn_head(dense.layer(dense.num_layers, attention, mixture), dense.model.hidden_size, dense.norm_eps)
    return replace(dense.model, layers=layers, names=names, mtp=head if num_mtp_layers else None)


def solar_open_spec(config: HFConfig) -> ModelSpec:
    """Read a `SolarOpenForCausalLM`: experts in all layers."""
    dense = read_dense(
        config,
        max_position=131072,
        head_dim=128,
        num_kv_heads=8,
        norm_eps=1e-5,
        theta=1_000_000.0,
        reads_mlp=False,
    )
    attention = replace(dense.attention, qkv_bias=config.get("attention_bias", False))
    mixture = sigmoid_mixture(
        config,
        dense.model.hidden_size,
        experts=("n_routed_experts", 128),
        top_k=8,
        shared=("n_shared_experts", 1),
        inner=1280,
    )
    layers = tuple(dense.layer(index, attention, mixture) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)


def _attention(config: HFConfig, dense: Dense) -> AttentionSpec:
    normed = config.get("use_qk_norm", False)
    return replace(
        dense.attention,
        qkv_bias=config.get("attention_bias", False),
        qk_norm_eps=dense.norm_eps if normed else None,
    )
