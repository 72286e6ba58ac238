"""Gemma 2: norms before and after each part, soft caps on scores and logits, every second layer slides."""

from dataclasses import replace

from penstock.layers.spec import NormSpec
from penstock.models.dense import Dense, read_dense
from penstock.models.hf_config import HFConfig
from penstock.models.spec import Branch, LayerSpec, ModelSpec


def gemma2_spec(config: HFConfig) -> ModelSpec:
    """Read a `Gemma2ForCausalLM`."""
    dense = read_gemma(config, max_position=8192)
    attention = replace(dense.attention, rope=config.rope(dense.attention.head_dim, dense.model.max_position))
    window = config.find_size("sliding_window") or 4096
    slides = [index % 2 == 0 for index in range(dense.num_layers)]
    windows = config.layer_windows(dense.num_layers, window, slides)
    layers = tuple(gemma_layer(dense, index, replace(attention, window=one)) for index, one in enumerate(windows))
    return replace(dense.model, layers=layers)
