"""IBM's Granite 3 (dense): Llama with four scales of its own."""

from dataclasses import replace

from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HFConfig
from penstock.models.llama import llama_config


def granite_config(config: HFConfig) -> DecoderConfig:
    """Read a `GraniteForCausalLM`."""
    return replace(
        llama_config(config),
        embedding_multiplier=config.positive("embedding_multiplier", 1.0),
        attention_scale=config.positive("attention_multiplier", 1.0),
        residual_multiplier=config.positive("residual_multiplier", 1.0),
        logits_divisor=config.positive("logits_scaling", 1.0),
    )
