"""ByteDance's Seed-OSS (36B): Llama with biases on queries, keys and values, and an independent head size.

x += attention(norm(x))      Llama's, with bq, bk and bv
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def seed_oss_spec(config: HFConfig) -> ModelSpec:
    """Read a `SeedOssForCausalLM`."""
    dense = read_dense(config, max_position=524288, head_dim=128, num_heads=80, num_kv_heads=8)
    attention = replace(
        dense.attention,
        qkv_bias=config.get("attention_bias", True),
        output_bias=config.get("attention_out_bias", False),
    )
    mlp = replace(dense.mlp, bias=config.get("mlp_bias", False))
    layers = tuple(dense.layer(index, attention, mlp) for index in range(dense.num_layers))
    return replace(dense.model, layers=layers)
