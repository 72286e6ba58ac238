"""Qwen1.5 and Qwen2 mixtures of experts (A2.7B, 57B-A14B): Qwen2 with experts and a gated shared expert.

x += attention(norm(x))                         Qwen2's
n = norm(x)
p = top_k(softmax(Wr n))                        may be divided by their sum
x += sum of p[e] * mlp_e(n) + sigmoid(Ws n) * shared_mlp(n)
"""

from dataclasses import replace

from penstock.models.families.dense import read_dense
from penstock.models.families.qwen3_5 import qwen_mixture
from penstock.models.families.qwen3_moe import mlp_layers
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def qwen2_moe_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen2MoeForCausalLM`."""
    dense = read_dense(config, max_position=32768)
    windows = _windows(config, dense.num_layers)
    attention = replace(dense.attention, qkv_bias=config.get("qkv_bias", True))
    mixture = qwen_mixture(
        config,
        dense,
        experts=60,
        top_k=4,
        inner=1408,
        shared_inner=5632,
        renormalize=config.get("norm_topk_prob", False),
    )
    plain = mlp_layers(config, dense.num_layers)
    layers = tuple(
        dense.layer(index, replace(attention, window=window), None if index in plain else mixture)
        for index, window in enumerate(windows)
    )
    return replace(dense.model, layers=layers)


def _windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: in `transformers`, every other one of the first `max_window_layers` layers has it."""
    first_full = config.size("max_window_layers", 28, least=0)
    window = None
    if config.get("use_sliding_window", False):
        window = config.find_size("sliding_window", absent=4096)
    else:
        config.ignore("sliding_window")
    return config.layer_windows(num_layers, window, lambda index: index % 2 == 0 and index < first_full)
