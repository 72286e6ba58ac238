"""Llama 2 and 3, and the many models of the same shape."""

from dataclasses import replace

from penstock.models.decoder_config import DecoderConfig
from penstock.models.dense import dense_config
from penstock.models.hf_config import HFConfig


def llama_config(config: HFConfig) -> DecoderConfig:
    """Read a `LlamaForCausalLM`."""
    attention_bias = config.get("attention_bias", False)
    return replace(
        dense_config(config, max_position=2048),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", False),
    )
