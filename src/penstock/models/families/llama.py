"""Llama 2 and 3, and the many models with the same architecture.

n = norm(x)                                     rms_norm
q, k, v = rope(Wq n), rope(Wk n), Wv n          several query heads share a key head
x += Wo (softmax(q kᵀ / sqrt(head_dim)) v)      causal: `attention(n)` in other families' pictures
n = norm(x)
x += Wd (silu(Wg n) * (Wu n))                   `mlp(n)`

logits = W norm(x)                              after the last layer; W may be the embedding
"""

from dataclasses import replace

from penstock.models.families.dense import Dense, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def llama_parts(config: HFConfig) -> Dense:
    """The parts of a `LlamaForCausalLM`."""
    dense = read_dense(config, max_position=2048)
    bias = config.get("attention_bias", False)
    return replace(
        dense,
        attention=replace(dense.attention, qkv_bias=bias, output_bias=bias),
        mlp=replace(dense.mlp, bias=config.get("mlp_bias", False)),
    )


def llama_spec(config: HFConfig) -> ModelSpec:
    """Read a `LlamaForCausalLM`."""
    dense = llama_parts(config)
    return replace(dense.model, layers=tuple(dense.layer(index) for index in range(dense.num_layers)))
