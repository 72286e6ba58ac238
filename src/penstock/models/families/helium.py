"""Helium 1 (2B): Llama with interleaved RoPE.

x += attention(norm(x))      Llama's; RoPE turns elements 2 i and 2 i + 1 of a head together
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def helium_spec(config: HFConfig) -> ModelSpec:
    """Read a `HeliumForCausalLM`."""
    dense = read_dense(config, max_position=4096, head_dim=128, num_kv_heads=20, norm_eps=1e-8, theta=100000.0)
    attention = replace(dense.attention, qkv_bias=config.get("attention_bias", False), interleaved_rope=True)
    mlp = replace(dense.mlp, bias=config.get("mlp_bias", False))
    return replace(dense.model, layers=tuple(dense.layer(index, attention, mlp) for index in range(dense.num_layers)))
