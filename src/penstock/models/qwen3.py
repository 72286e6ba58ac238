"""Qwen3 (dense): queries and keys are normalised by head; no biases by default."""

from dataclasses import replace

from penstock.models.decoder_config import DecoderConfig
from penstock.models.dense import dense_config
from penstock.models.hf_config import HFConfig
from penstock.models.qwen2 import qwen_windows


def qwen3_config(config: HFConfig) -> DecoderConfig:
    """Read a `Qwen3ForCausalLM`."""
    decoder = dense_config(config, max_position=32768, head_dim=128)
    attention_bias = config.get("attention_bias", False)
    return replace(
        decoder,
        sliding_windows=qwen_windows(config, decoder.num_layers),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        qk_norm=True,
    )
