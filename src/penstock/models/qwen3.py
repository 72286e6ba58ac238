"""Qwen3 (dense): queries and keys are normalised by head; no biases by default."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HFConfig
from penstock.models.qwen2 import qwen_windows


def qwen3_config(config: HFConfig) -> DecoderConfig:
    """Read a `Qwen3ForCausalLM`."""
    config.expect("hidden_act", "silu")
    num_heads = config.need_positive("num_attention_heads")
    head_dim = config.get("head_dim", 128)
    max_position = config.get("max_position_embeddings", 32768)
    rope = config.rope(head_dim, max_position)
    attention_bias = config.get("attention_bias", False)
    return DecoderConfig(
        dtype=config.dtype(),
        vocab_size=config.need_positive("vocab_size"),
        hidden_size=config.need_positive("hidden_size"),
        intermediate_size=config.need_positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position=rope.context(max_position),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        sliding_windows=qwen_windows(config, config.need_positive("num_hidden_layers")),
        tie_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        qk_norm=True,
    )
