"""Mistral 7B, Nemo and Small: Llama's shape, a head size of its own, a sliding window in the oldest."""

from dataclasses import replace

from penstock.models.decoder_config import DecoderConfig
from penstock.models.dense import dense_config
from penstock.models.hf_config import HFConfig


def mistral_config(config: HFConfig) -> DecoderConfig:
    """Read a `MistralForCausalLM`."""
    decoder = dense_config(config, max_position=4096 * 32, num_kv_heads=8)
    return replace(decoder, sliding_windows=(config.find_size("sliding_window"),) * decoder.num_layers)
