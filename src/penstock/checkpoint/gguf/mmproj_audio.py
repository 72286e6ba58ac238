"""Readers of the audio encoders in llama.cpp's `mmproj` files: sizes of the encoder, and the placeholder of sounds.

Files do not have the settings of windows and chunks, which llama.cpp has in its code: the families' readers have them,
too, as the defaults of `config.json`.
"""

from collections.abc import Callable
from typing import Any

from penstock.checkpoint.gguf.mmproj_keys import EncoderSettings, GivenEncoder

_EPS = 1e-5
"""Of the norms of Whisper's encoder."""
_STACKED = 4
"""Positions that Voxtral joins to a feature."""


def _whisper(given: GivenEncoder) -> dict[str, Any]:
    """The sizes of Whisper's layers, which all have: `audio_config`."""
    given.expect_epsilon(_EPS)
    return {
        "num_mel_bins": given.size("num_mel_bins"),
        "d_model": given.size("embedding_length"),
        "encoder_layers": given.num_layers(),
        "encoder_attention_heads": given.size("attention.head_count"),
        "encoder_ffn_dim": given.size("feed_forward_length"),
    }


def _with_positions(given: GivenEncoder) -> dict[str, Any]:
    """`audio_config` of an encoder with learned positions."""
    return _whisper(given) | {"max_source_positions": given.shape("a.position_embd.weight", 2)[0]}


def _qwen2_audio(given: GivenEncoder) -> EncoderSettings:
    return {"audio_token_id": given.token("<|AUDIO|>")}, _with_positions(given), {}


def _audio_flamingo3(given: GivenEncoder) -> EncoderSettings:
    config = {"audio_token_id": given.token("<sound>"), "projector_bias": "mm.a.mlp.1.bias" in given.tensors}
    return config, _with_positions(given), {}


def _voxtral(given: GivenEncoder) -> EncoderSettings:
    given.keys.expect("audio.projector.stack_factor", _STACKED)
    return {"audio_token_id": given.token("[AUDIO]")}, _with_positions(given), {}


def _qwen2_5_omni(given: GivenEncoder) -> EncoderSettings:
    audio = _whisper(given) | {"output_dim": given.text["hidden_size"]}
    return {"audio_token_id": given.token("<|AUDIO|>")}, audio, {}


def _qwen3_omni(given: GivenEncoder) -> EncoderSettings:
    audio = _whisper(given) | {
        "output_dim": given.text["hidden_size"],
        "downsample_hidden_size": given.shape("a.conv2d.1.weight", 4)[0],
    }
    return {"audio_token_id": given.token("<|audio_pad|>")}, audio, {}


AUDIO_READERS: dict[str, Callable[[GivenEncoder], EncoderSettings]] = {
    "qwen2a": _qwen2_audio,
    "musicflamingo": _audio_flamingo3,
    "voxtral": _voxtral,
    "qwen2.5o": _qwen2_5_omni,
    "qwen3a": _qwen3_omni,
}
"""By `clip.projector_type`."""
