"""Audio Flamingo 3 (NVIDIA): Qwen2 with Whisper's encoder, in windows of 30 seconds.

x += attention(norm(x)); x += mlp(norm(x))      Qwen2's
features = W2 gelu(W1 norm(means of pairs))     of the encoder's positions, in place of the embeddings of audio tokens
"""

from dataclasses import replace

from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.qwen2 import qwen2_spec
from penstock.models.families.qwen2_audio import MARGIN, TEXT
from penstock.models.families.towers.whisper_encoder import layer_norm, read_encoder
from penstock.models.hf_config import HFConfig
from penstock.models.spec import AudioEncoderSpec, MergeSpec, ModelSpec, ProjectionSpec

_TOWER = ("audio_config", "audio_token_id", "projector_hidden_act", "projector_bias")


def audio_flamingo3_spec(config: HFConfig) -> ModelSpec:
    """Read an `AudioFlamingo3ForConditionalGeneration`."""
    names = multimodal_names("audio_tower", "multi_modal_projector")
    model = replace(qwen2_spec(config.text(*_TOWER, defaults=TEXT)), names=names)

    def complete(audio: HFConfig, encoder: AudioEncoderSpec) -> AudioEncoderSpec:
        config.expect("projector_hidden_act", "gelu")
        bias, size, text_size = config.get("projector_bias", True), encoder.hidden_size, model.hidden_size
        name = "multi_modal_projector"
        connector = (
            MergeSpec(mean=True),
            layer_norm("audio_tower.layer_norm", size),
            ProjectionSpec(f"{name}.linear_1", size, text_size, bias=bias, activation="gelu"),
            ProjectionSpec(f"{name}.linear_2", text_size, text_size, bias=bias),
        )
        return replace(encoder, group=2, connector=connector, margin=MARGIN)

    return replace(model, audio_encoder=read_encoder(config, complete))
