"""IBM's Granite 3 mixtures of experts (1B-A400M, 3B-A800M): Granite with experts instead of MLPs.

x = embedding_multiplier * embedding
x += residual_multiplier * attention(norm(x))   scores are multiplied by attention_multiplier
n = norm(x)
p = softmax(top_k(Wr n))
x += residual_multiplier * sum of p[e] * mlp_e(n)                        GraniteMoeShared: + shared_mlp(n)

logits = W norm(x) / logits_scaling
"""

from dataclasses import replace

from penstock.layers.mixture import MixtureSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.granite import granite_model
from penstock.models.families.granite_moe_hybrid import EXPERT_NAMES, shared_mlp
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def granite_moe_spec(config: HFConfig) -> ModelSpec:
    """Read a `GraniteMoeForCausalLM`."""
    return _granite_moe(config, shared=0)


def granite_moe_shared_spec(config: HFConfig) -> ModelSpec:
    """Read a `GraniteMoeSharedForCausalLM`: with a shared expert, if it has a size."""
    return _granite_moe(config, shared=config.size("shared_intermediate_size", 0, least=0))


def _granite_moe(config: HFConfig, shared: int) -> ModelSpec:
    dense = read_dense(config, max_position=2048)
    bias = config.get("attention_bias", False)
    attention = replace(
        dense.attention,
        scale=config.positive("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    return granite_model(config, dense, [attention] * dense.num_layers, granite_mixture(config, dense, shared))


def granite_mixture(config: HFConfig, dense: Dense, shared: int) -> MixtureSpec:
    """Granite's mixture of experts, with a shared expert of the size `shared`, or none if that is 0."""
    hidden = dense.model.hidden_size
    return MixtureSpec(
        hidden,
        dense.mlp.intermediate_size,
        read_routing(config, config.size("num_local_experts", 8), 2, score="softmax_of_top"),
        shared=shared_mlp(hidden, shared) if shared else None,
        names=EXPERT_NAMES,
    )
