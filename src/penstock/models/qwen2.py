"""Qwen2 and Qwen2.5 (dense): biases on queries, keys and values; the upper layers may slide."""

from dataclasses import replace

from penstock.models.decoder_config import DecoderConfig
from penstock.models.dense import dense_config
from penstock.models.hf_config import HFConfig


def qwen2_config(config: HFConfig) -> DecoderConfig:
    """Read a `Qwen2ForCausalLM`."""
    config.expect("use_mrope", False)
    decoder = dense_config(config, max_position=32768)
    return replace(decoder, sliding_windows=qwen_windows(config, decoder.num_layers), qkv_bias=True)


def qwen_windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """Qwen names a window in every checkpoint and says in another place whether it is used."""
    window = config.find_size("sliding_window")
    used = config.get("use_sliding_window", False)
    return config.layer_windows(num_layers, window if used else None, config.size("max_window_layers", 28, least=0))
