"""Gemma 1 (2B, 7B, CodeGemma): Llama with scaled embeddings, norms that multiply by 1 + weight, and gelu for silu.

x = sqrt(hidden_size) * embedding
x += attention(norm(x))                         Llama's; norms multiply by 1 + weight
x += mlp(norm(x))                               gelu for silu
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def gemma_spec(config: HFConfig) -> ModelSpec:
    """Read a `GemmaForCausalLM`."""
    config.expect("use_bidirectional_attention", None, False)
    dense = read_dense(
        config,
        max_position=8192,
        head_dim=256,
        num_heads=16,
        num_kv_heads=16,
        vocab_size=256000,
        norm_offset=1.0,
        tied=True,
        activation="gelu_tanh",
    )
    bias = config.get("attention_bias", False)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias)
    return replace(
        dense.model,
        layers=tuple(dense.layer(index, attention) for index in range(dense.num_layers)),
        embedding_multiplier=dense.model.hidden_size**0.5,
    )
