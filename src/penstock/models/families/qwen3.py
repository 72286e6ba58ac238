"""Qwen3 (dense): norms of query and key heads; no biases by default.

q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); q and k are normalised head by head, before RoPE
x += Wo attend(rope(q), rope(k), v)
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.families.qwen2 import qwen_attentions
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def qwen3_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen3ForCausalLM`."""
    dense = read_dense(config, max_position=32768, head_dim=128)
    bias = config.get("attention_bias", False)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias, qk_norm_eps=dense.norm_eps)
    attentions = qwen_attentions(config, attention, dense.num_layers)
    layers = tuple(dense.layer(index, attention) for index, attention in enumerate(attentions))
    return replace(dense.model, layers=layers)
