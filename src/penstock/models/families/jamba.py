"""Jamba (Mini, Large, Reasoning): Mamba in seven of eight layers, attention without RoPE, experts in every second.

x += mixer(norm(x))                             Mamba with norms of dt, B and C; or Llama's attention without RoPE
n = norm(x)
p = top_k(softmax(Wr n))                        not divided by their sum
x += sum of p[e] * mlp_e(n) over those experts e                         other layers: mlp(n)
"""

import math
from dataclasses import replace

from penstock.layers.mamba import MambaSpec
from penstock.layers.mixture import MixtureNames, MixtureSpec
from penstock.layers.mlp import GatedMLPSpec
from penstock.layers.spec import FeedForwardSpec, MixerSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.mixtures import read_routing, sparse_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer

_NAMES = MixtureNames(router="feed_forward.router", experts="feed_forward.experts")


def jamba_spec(config: HFConfig) -> ModelSpec:
    """Read a `JambaForCausalLM`."""
    config.ignore("use_mamba_kernels", "num_logits_to_keep", "use_mambapy", "use_associative_scan", "layers_block_type")
    config.expect("sliding_window", None)
    dense = read_dense(config, max_position=262144, num_kv_heads=8, reads_rope=False)
    mixers, parts = _mixers(config, dense), _feed_forwards(config, dense)
    return replace(
        dense.model,
        layers=tuple(
            LayerSpec(
                f"model.layers.{index}",
                SubLayer(mixer, dense.norm("input_layernorm")),
                SubLayer(part, dense.norm("pre_ff_layernorm")),
            )
            for index, (mixer, part) in enumerate(zip(mixers, parts, strict=True))
        ),
        final_norm=dense.norm("model.final_layernorm"),
    )


def _mixers(config: HFConfig, dense: Dense) -> list[MixerSpec]:
    period, offset = config.size("attn_layer_period", 8), config.size("attn_layer_offset", 4, least=0)
    kinds: dict[str, MixerSpec] = {"linear_attention": _mamba(config, dense), "full_attention": dense.attention}
    default = [
        "full_attention" if index % period == offset else "linear_attention" for index in range(dense.num_layers)
    ]
    return [kinds[kind] for kind in config.layer_kinds(dense.num_layers, tuple(kinds), default)]


def _mamba(config: HFConfig, dense: Dense) -> MambaSpec:
    hidden = dense.model.hidden_size
    return MambaSpec(
        hidden,
        config.size("mamba_expand", 2) * hidden,
        state_size=config.size("mamba_d_state", 16),
        kernel=config.size("mamba_d_conv", 4, least=2),
        rank=config.size("mamba_dt_rank", math.ceil(hidden / 16)),
        norm_eps=dense.norm_eps,
        bias=config.get("mamba_proj_bias", False),
        conv_bias=config.get("mamba_conv_bias", True),
    )


def _feed_forwards(config: HFConfig, dense: Dense) -> list[FeedForwardSpec]:
    """The MLP or the experts of each layer."""
    hidden, inner = dense.model.hidden_size, dense.mlp.intermediate_size
    mlp = GatedMLPSpec(
        hidden,
        inner,
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    )
    experts = config.size("num_experts", 16)
    if experts == 1:
        config.ignore("num_experts_per_tok", "expert_layer_period", "expert_layer_offset", "mlp_layer_types")
        return [mlp] * dense.num_layers
    mixture = MixtureSpec(hidden, inner, read_routing(config, experts, 2), names=_NAMES)
    period, offset = config.size("expert_layer_period", 2), config.size("expert_layer_offset", 1, least=0)
    sparse = sparse_layers(config, dense.num_layers, lambda index: index % period == offset)
    return [mixture if has else mlp for has in sparse]
