"""dots.llm1 (142B-A14B): Qwen3's attention, and DeepSeek V3's mixtures of experts after the first layers.

q, k, v = norm(Wq n), norm(Wk n), Wv n          n = norm(x); q and k are normalised head by head
x += Wo attend(rope(q), rope(k), v)
n = norm(x)
s = sigmoid(Wr n)                               the experts are chosen by s + correction
x += scaling * sum of s[e] / sum(s) * mlp_e(n) + shared_mlp(n)           the first layers: mlp(n)
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.families.mixtures import sigmoid_mixture
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def dots1_spec(config: HFConfig) -> ModelSpec:
    """Read a `Dots1ForCausalLM`."""
    dense = read_dense(config, max_position=2048, num_kv_heads=32)
    bias = config.get("attention_bias", False)
    attention = replace(dense.attention, qkv_bias=bias, output_bias=bias, qk_norm_eps=dense.norm_eps)
    window = config.find_size("sliding_window", absent=4096)
    first = config.size("max_window_layers", 62, least=0)
    windows = config.layer_windows(dense.num_layers, window, lambda index: index >= first)
    mixture = sigmoid_mixture(config, dense.model.hidden_size, inner=1408, renormalize=False)
    plain = config.size("first_k_dense_replace", 0, least=0)
    layers = tuple(
        dense.layer(index, replace(attention, window=layer_window), mixture if index >= plain else None)
        for index, layer_window in enumerate(windows)
    )
    return replace(dense.model, layers=layers)
