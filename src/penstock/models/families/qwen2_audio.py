"""Qwen2-Audio: Qwen2 with Whisper's encoder for sounds of up to 30 seconds.

x += attention(norm(x)); x += mlp(norm(x))      Qwen2's
features = W norm(means of pairs)               of the encoder's positions, in place of the embeddings of audio tokens
"""

from dataclasses import replace

from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.qwen2 import qwen2_spec
from penstock.models.families.towers.whisper_encoder import layer_norm, read_encoder
from penstock.models.hf_config import HFConfig
from penstock.models.spec import AudioEncoderSpec, MergeSpec, ModelSpec, ProjectionSpec

_TOWER = ("audio_config", "audio_token_index", "audio_token_id", "ignore_index", "vocab_size")
TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
"""Of a `Qwen2Config` without settings."""
MARGIN = 2
"""Frames after a sound that the convolutions see: those of the silence that fills its window."""


def qwen2_audio_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen2AudioForConditionalGeneration`."""
    names = multimodal_names("audio_tower", "multi_modal_projector")
    model = replace(qwen2_spec(config.text(*_TOWER, defaults=TEXT)), names=names)

    def complete(audio: HFConfig, encoder: AudioEncoderSpec) -> AudioEncoderSpec:
        connector = (
            MergeSpec(mean=True),
            layer_norm("audio_tower.layer_norm", encoder.hidden_size),
            ProjectionSpec("multi_modal_projector.linear", encoder.hidden_size, model.hidden_size, bias=True),
        )
        return replace(encoder, group=2, connector=connector, margin=MARGIN)

    return replace(model, audio_encoder=read_encoder(config, complete))
