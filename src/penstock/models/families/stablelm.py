"""StableLM 2 (1.6B, Zephyr, Code): Llama with layer norms, RoPE on a quarter of each head, biases of q, k and v.

x += attention(norm(x))      Llama's; layer norms with biases
x += mlp(norm(x))            some models: attention and MLP side by side, after one norm
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec, SubLayer


def stablelm_spec(config: HFConfig) -> ModelSpec:
    """Read a `StableLmForCausalLM`."""
    config.expect("qk_layernorm", False)
    dense = read_dense(
        config,
        max_position=4096,
        norm_eps=1e-5,
        norm_eps_key="layer_norm_eps",
        norm_bias=True,
        partial_rotary=0.25,
    )
    attention = replace(dense.attention, qkv_bias=config.get("use_qkv_bias", False))
    parallel = config.get("use_parallel_residual", False)
    layers = (dense.layer(index, attention) for index in range(dense.num_layers))
    if parallel:
        layers = (replace(layer, feed_forward=SubLayer(dense.mlp, None), parallel=True) for layer in layers)
    return replace(dense.model, layers=tuple(layers))
