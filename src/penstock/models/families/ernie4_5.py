"""ERNIE 4.5 (dense): Llama with interleaved RoPE; either all linear layers have biases or none.

x += attention(norm(x))      Llama's; RoPE turns elements 2 i and 2 i + 1 of a head together
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def ernie4_5_spec(config: HFConfig) -> ModelSpec:
    """Read an `Ernie4_5ForCausalLM`."""
    dense = read_dense(
        config, max_position=131072, head_dim=128, num_kv_heads=2, norm_eps=1e-5, theta=500000.0, tied=True
    )
    bias = config.get("use_bias", False)
    attention = replace(dense.attention, interleaved_rope=True, qkv_bias=bias, output_bias=bias)
    mlp = replace(dense.mlp, bias=bias)
    layers = tuple(dense.layer(index, attention, mlp) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)
