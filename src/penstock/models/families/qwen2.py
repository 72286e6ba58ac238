"""Qwen2 and Qwen2.5 (dense): biases on queries, keys and values; optionally sliding windows in the upper layers.

q, k, v = Wq n + bq, Wk n + bk, Wv n + bv       n = norm(x)
x += Wo attend(rope(q), rope(k), v)             upper layers: over `sliding_window` keys, if it is used
x += mlp(norm(x))
"""

from dataclasses import replace

from penstock.layers.attention import AttentionSpec
from penstock.models.families.dense import read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def qwen2_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen2ForCausalLM`."""
    config.expect("use_mrope", False)
    dense = read_dense(config, max_position=32768)
    attentions = qwen_attentions(config, replace(dense.attention, qkv_bias=True), dense.num_layers)
    layers = tuple(dense.layer(index, attention) for index, attention in enumerate(attentions))
    return replace(dense.model, layers=layers)


def qwen_attentions(config: HFConfig, attention: AttentionSpec, num_layers: int) -> list[AttentionSpec]:
    """The attention of each layer. Every Qwen checkpoint has `sliding_window`; `use_sliding_window` enables it."""
    window = config.find_size("sliding_window", absent=4096)
    if window is not None and attention.bidirectional:
        window += 1  # then it counts the keys on one side, without the query's own
    used = config.get("use_sliding_window", False)
    first = config.size("max_window_layers", 28, least=0)
    windows = config.layer_windows(num_layers, window if used else None, lambda index: index >= first)
    return [replace(attention, window=layer_window) for layer_window in windows]
