"""What the `config.json`s of all dense families have in common."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HFConfig


def dense_config(
    config: HFConfig, *, max_position: int, head_dim: int | None = None, num_kv_heads: int | None = None
) -> DecoderConfig:
    """Read sizes, norm, rotary positions and tying; a family puts what is its own over it with `replace`.

    The arguments are what the family takes an absent key for; where they are None, `head_dim` is the hidden size a
    head, and each head has keys of its own.

    Raises:
        CheckpointError: a key is missing, of a wrong type, or has a value that is not supported.
    """
    config.expect("hidden_act", "silu")
    config.expect("is_encoder_decoder", False)
    config.expect("add_cross_attention", False)
    config.expect("pruned_heads", {})
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", head_dim or hidden_size // num_heads)
    max_position = config.size("max_position_embeddings", max_position)
    rope = config.rope(head_dim, max_position)
    return DecoderConfig(
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_kv_heads or num_heads),
        head_dim=head_dim,
        max_position=rope.context(max_position),
        norm_eps=config.positive("rms_norm_eps", 1e-6, or_zero=True),
        rope=rope,
        sliding_windows=(None,) * config.size("num_hidden_layers"),
        tie_embeddings=config.get("tie_word_embeddings", False),
    )
