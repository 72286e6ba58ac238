"""Code World Model (32B): Llama with a sliding window in three of four layers.

x += attention(norm(x))      Llama's; over `sliding_window` keys in three of four layers
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
"""Of configs without `rope_parameters`."""


def cwm_spec(config: HFConfig) -> ModelSpec:
    """Read a `CwmForCausalLM`."""
    dense = read_dense(config, max_position=131072, head_dim=128, num_kv_heads=8, norm_eps=1e-5, theta=1_000_000.0)
    rope = dense.attention.rope
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        rope = config.rope_of(_ROPE, dense.attention.head_dim, dense.model.max_position)
    window = config.size("sliding_window", 8192)
    windows = config.layer_windows(dense.num_layers, window, lambda index: index % 4 != 0)
    mlp = replace(dense.mlp, bias=config.get("mlp_bias", False))
    layers = tuple(
        dense.layer(index, replace(dense.attention, rope=rope, window=layer_window), mlp)
        for index, layer_window in enumerate(windows)
    )
    return replace(dense.model, layers=layers)
