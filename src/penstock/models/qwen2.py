"""Qwen2 and Qwen2.5 (dense): biases on queries, keys and values; the upper layers may slide."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HFConfig


def qwen2_config(config: HFConfig) -> DecoderConfig:
    """Read a `Qwen2ForCausalLM`."""
    config.expect("hidden_act", "silu")
    config.expect("use_mrope", False)
    hidden_size, num_heads = config.need_positive("hidden_size"), config.need_positive("num_attention_heads")
    head_dim = config.get("head_dim", hidden_size // num_heads)
    max_position = config.get("max_position_embeddings", 32768)
    rope = config.rope(head_dim, max_position)
    return DecoderConfig(
        dtype=config.dtype(),
        vocab_size=config.need_positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.need_positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position=rope.context(max_position),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        sliding_windows=qwen_windows(config, config.need_positive("num_hidden_layers")),
        tie_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=True,
    )


def qwen_windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """Qwen names a window in every checkpoint and says in another place whether it is used."""
    window = config.find("sliding_window", int)
    used = config.get("use_sliding_window", False)
    return config.layer_windows(num_layers, window if used else None, config.get("max_window_layers", 28))
