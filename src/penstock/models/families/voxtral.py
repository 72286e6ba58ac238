"""Voxtral (Mistral AI): Ministral's text model with Whisper's encoder, in windows of 30 seconds.

x += attention(norm(x)); x += mlp(norm(x))      Llama's
features = W2 gelu(W1 [four positions])         of the encoder, in place of the embeddings of audio tokens
"""

from dataclasses import replace

from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.llama import llama_spec
from penstock.models.families.mistral import mistral_spec
from penstock.models.families.towers.whisper_encoder import layer_norm, read_encoder
from penstock.models.hf_config import HFConfig
from penstock.models.spec import AudioEncoderSpec, MergeSpec, ModelSpec, ProjectionSpec

_TOWER = ("audio_config", "audio_token_id", "projector_hidden_act", "hidden_size")
_NAMES = ("audio_tower", "multi_modal_projector")
_TEXT = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
    "head_dim": 128,
}
POSITIONS = 4
"""Positions of a feature."""


def voxtral_spec(config: HFConfig) -> ModelSpec:
    """Read a `VoxtralForConditionalGeneration`."""
    text = config.text(*_TOWER, defaults=_TEXT)
    kind = text.get("model_type", "llama")
    families = {"llama": llama_spec, "mistral": mistral_spec}
    if kind not in families:
        raise text.unsupported("model_type of text_config", kind, tuple(families))
    model = replace(families[kind](text), names=multimodal_names(*_NAMES))

    def complete(audio: HFConfig, encoder: AudioEncoderSpec) -> AudioEncoderSpec:
        config.expect("projector_hidden_act", "gelu")
        size, text_size = encoder.hidden_size * POSITIONS, model.hidden_size
        if encoder.num_positions % POSITIONS:
            raise audio.unsupported("max_source_positions", encoder.num_positions, (f"multiples of {POSITIONS}",))
        connector = (
            layer_norm("audio_tower.layer_norm", encoder.hidden_size),
            MergeSpec(),
            ProjectionSpec("multi_modal_projector.linear_1", size, text_size, activation="gelu"),
            ProjectionSpec("multi_modal_projector.linear_2", text_size, text_size),
        )
        return replace(encoder, group=POSITIONS, connector=connector)

    return replace(model, audio_encoder=read_encoder(config, complete))
