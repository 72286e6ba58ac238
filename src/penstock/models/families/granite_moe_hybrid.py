"""Granite 4 hybrids: Mamba 2 in most layers, attention without RoPE in others, experts, Granite's scaling factors.

x = embedding_multiplier * embedding
x += residual_multiplier * mixer(norm(x))       Mamba 2, or attention without RoPE
n = norm(x)
p = softmax(top_k(Wr n))
x += residual_multiplier * (sum of p[e] * mlp_e(n) + shared_mlp(n))      without experts: shared_mlp(n)

logits = W norm(x) / logits_scaling
"""

import math
from dataclasses import replace
from typing import Any

from penstock.layers.mamba2 import Mamba2Spec
from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.spec import FeedForwardSpec, MixerSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.granite import granite_model
from penstock.models.families.mixtures import read_routing
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}
EXPERT_NAMES = MixtureNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    stacked=(
        ("block_sparse_moe.input_linear", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear", "block_sparse_moe.experts.down_proj"),
    ),
)


def granite_moe_hybrid_spec(config: HFConfig) -> ModelSpec:
    """Read a `GraniteMoeHybridForCausalLM`."""
    has_rope = config.find("position_embedding_type", str) == "rope"
    config.expect("position_embedding_type", None, "nope", "rope")
    if not has_rope:
        config.ignore("rope_parameters", "rope_theta", "rope_scaling")
    dense = read_dense(config, max_position=2048, reads_rope=has_rope)
    mixers = _mixers(config, dense)
    part = _feed_forward(config, dense)
    return granite_model(config, dense, mixers, part)


def _feed_forward(config: HFConfig, dense: Dense) -> FeedForwardSpec:
    """A mixture of experts with a shared MLP, or the MLP alone in models without experts."""
    hidden = dense.model.hidden_size
    mlp = shared_mlp(hidden, config.size("shared_intermediate_size", 1024))
    experts = config.size("num_local_experts", 8, least=0)
    if not experts:
        config.ignore("num_experts_per_tok")
        return mlp
    routing = read_routing(config, experts, 2, score="softmax_of_top")
    return MixtureSpec(hidden, dense.mlp.intermediate_size, routing, shared=mlp, names=EXPERT_NAMES)


def shared_mlp(hidden_size: int, intermediate_size: int) -> GatedMLPSpec:
    """The shared expert of Granite's models, with gate and up in one matrix."""
    return GatedMLPSpec(
        hidden_size, intermediate_size, gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"
    )


def _mixers(config: HFConfig, dense: Dense) -> list[MixerSpec]:
    """The mixer of each layer, by `layer_types`; older files have other names for the types."""
    bias = config.get("attention_bias", False)
    scale = config.positive("attention_multiplier", 1.0)
    mamba = read_mamba(config, dense)
    attention = replace(dense.attention, scale=scale, qkv_bias=bias, output_bias=bias)
    kinds: dict[str, MixerSpec] = {"linear_attention": mamba, "full_attention": attention}
    default = ["linear_attention"] * dense.num_layers
    named = config.layer_kinds(dense.num_layers, (*kinds, *_LEGACY), default)
    return [kinds[_LEGACY.get(kind, kind)] for kind in named]


def read_mamba(config: HFConfig, dense: Dense, inner: int | None = None) -> Mamba2Spec:
    """Mamba 2 as Granite, Bamba and Falcon-H1 have it, with `inner` columns of values; None: by `mamba_expand`."""
    hidden, heads = dense.model.hidden_size, config.size("mamba_n_heads", 128)
    groups = config.size("mamba_n_groups", 1)
    expanded = config.size("mamba_expand", 2) * hidden
    inner = expanded if inner is None else inner
    if inner % heads or heads % groups:
        raise config.unsupported("mamba_n_heads", heads, (f"a divisor of {inner} that {groups} groups share evenly",))
    config.expect("mamba_d_head", "auto", inner // heads)
    config.ignore("mamba_chunk_size")
    shortest, longest = step_limits(config)
    return Mamba2Spec(
        hidden_size=hidden,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_size=config.size("mamba_d_state", 256),
        kernel=config.size("mamba_d_conv", 4, least=2),
        norm_eps=dense.norm_eps,
        norm_groups=groups,
        shortest_step=shortest,
        longest_step=longest,
        bias=config.get("mamba_proj_bias", False),
        conv_bias=config.get("mamba_conv_bias", True),
    )


def step_limits(config: HFConfig) -> tuple[float, float]:
    """The shortest and the longest time step (`time_step_limit`)."""
    given: list[Any] = config.find("time_step_limit", list) or [0.0, math.inf]
    limits = [math.inf if limit in ("Infinity", {"__float__": "Infinity"}) else limit for limit in given]
    if len(limits) != 2 or not all(isinstance(limit, (int, float)) for limit in limits) or not limits[0] <= limits[1]:
        raise config.unsupported("time_step_limit", given, ("two numbers, the smaller one first",))
    return float(limits[0]), float(limits[1])
