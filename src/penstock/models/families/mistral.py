"""Mistral 7B, Nemo and Small, Ministral 8B: Llama with a head size of its own; some models have sliding windows.

x += attention(norm(x))      Llama's, over the last `sliding_window` keys where the config has one
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def mistral_spec(config: HFConfig) -> ModelSpec:
    """Read a `MistralForCausalLM`."""
    dense = read_dense(config, max_position=4096 * 32, num_kv_heads=8)
    attention = replace(dense.attention, window=config.find_size("sliding_window", absent=4096))
    return replace(dense.model, layers=tuple(dense.layer(index, attention) for index in range(dense.num_layers)))


def ministral_spec(config: HFConfig) -> ModelSpec:
    """Read a `MinistralForCausalLM`, in which some layers have windows, by `layer_types`."""
    dense = read_dense(config, max_position=4096 * 32, num_kv_heads=8)
    window = config.find_size("sliding_window", absent=4096)
    windows = config.layer_windows(dense.num_layers, window, lambda index: window is not None)
    layers = (
        dense.layer(index, replace(dense.attention, window=layer_window)) for index, layer_window in enumerate(windows)
    )
    return replace(dense.model, layers=tuple(layers))
