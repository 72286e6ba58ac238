"""Bamba (9B): Mamba 2 in most layers, attention with RoPE on half of each head in others, gated MLPs.

x += mixer(norm(x))                             Mamba 2, or Llama's attention in the layers `attn_layer_indices`
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.layers.mlp import GatedMLPSpec
from penstock.models.families.dense import read_dense
from penstock.models.families.granite_moe_hybrid import read_mamba
from penstock.models.hf_config import HFConfig
from penstock.models.spec import LayerSpec, ModelSpec, SubLayer


def bamba_spec(config: HFConfig) -> ModelSpec:
    """Read a `BambaForCausalLM`."""
    config.ignore("num_logits_to_keep", "z_loss_coefficient")
    config.expect("partial_rotary_factor", 0.5, None)
    dense = read_dense(config, max_position=262144, num_kv_heads=8, norm_eps=1e-5, partial_rotary=0.5)
    bias = config.get("attention_bias", False)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias)
    mamba = read_mamba(config, dense)
    mlp = GatedMLPSpec(
        dense.model.hidden_size,
        dense.mlp.intermediate_size,
        bias=config.get("mlp_bias", False),
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    )
    attending: list[object] = config.get("attn_layer_indices", [])
    return replace(
        dense.model,
        layers=tuple(
            LayerSpec(
                f"model.layers.{index}",
                SubLayer(attention if index in attending else mamba, dense.norm("input_layernorm")),
                SubLayer(mlp, dense.norm("pre_ff_layernorm")),
            )
            for index in range(dense.num_layers)
        ),
        final_norm=dense.norm("model.final_layernorm"),
    )
