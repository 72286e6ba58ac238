"""EXAONE 4: post-norms, norms of query and key heads; in models with sliding windows, only those layers have RoPE.

q, k, v = norm(Wq x), norm(Wk x), Wv x          head by head; none before the projections
x += norm(Wo attend(rope(q), rope(k), v))       full layers of models with windows: q and k are not rotated
x += norm(mlp(x))
"""

from dataclasses import replace

from penstock.layers.attention import AttentionSpec
from penstock.models.families.dense import Dense, read_dense
from penstock.models.families.olmo2 import olmo_layer
from penstock.models.hf_config import HFConfig
from penstock.models.spec import ModelSpec


def exaone4_spec(config: HFConfig) -> ModelSpec:
    """Read an `Exaone4ForCausalLM`."""
    dense = read_dense(config, max_position=2048, norm_eps=1e-5)
    attentions = exaone_attentions(config, dense)
    return replace(
        dense.model, layers=tuple(olmo_layer(dense, index, attention) for index, attention in enumerate(attentions))
    )


def exaone_attentions(config: HFConfig, dense: Dense) -> list[AttentionSpec]:
    """The attention of each layer: norms of heads; in models with sliding windows, only those layers have RoPE."""
    window = config.find_size("sliding_window", absent=4096)
    interval = 4
    if window is None or config.has("layer_types"):
        config.ignore("sliding_window_pattern")  # `layer_types` has the same information
    else:
        interval = config.size("sliding_window_pattern", interval)
    windows = config.layer_windows(dense.num_layers, window, lambda index: (index + 1) % interval != 0)
    attention = replace(dense.attention, qk_norm_eps=dense.norm_eps)
    return [
        replace(attention, window=layer_window, rope=attention.rope if window is None or layer_window else None)
        for layer_window in windows
    ]
