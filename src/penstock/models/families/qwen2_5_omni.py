"""Qwen2.5-Omni, the thinker: Qwen2 with Whisper's encoder in windows of two seconds, and a vision tower.

x += attention(norm(x)); x += mlp(norm(x))      Qwen2's; angles by time, row and column, as Qwen2-VL's
features = W norm(means of pairs)               of the encoder's positions, in place of the embeddings of audio tokens

The vision tower is Qwen2.5-VL's. A sound's tokens have the positions of text, one each. The talker is skipped.
"""

from collections.abc import Callable
from dataclasses import replace

from penstock.models.families.gemma3 import multimodal_names
from penstock.models.families.qwen2 import qwen2_spec
from penstock.models.families.towers.qwen_vision import qwen2_5_vision_tower
from penstock.models.families.towers.reading import read_tower, with_axes
from penstock.models.families.towers.whisper_encoder import check_sinusoids, layer_norm, read_encoder
from penstock.models.hf_config import HFConfig
from penstock.models.spec import AudioEncoderSpec, MergeSpec, ModelNames, ModelSpec, ProjectionSpec, TowerSpec

TOWERS = (
    *("audio_config", "vision_config", "audio_token_index", "audio_token_id", "image_token_index", "image_token_id"),
    *("video_token_index", "video_token_id", "audio_start_token_id", "audio_end_token_id", "vision_start_token_id"),
    *("vision_end_token_id", "vision_token_id", "position_id_per_seconds", "seconds_per_chunk", "user_token_id"),
    *("ignore_index", "init_std"),
)
_SPEECH = (
    *("talker_config", "token2wav_config", "code2wav_config", "enable_audio_output", "enable_talker"),
    *("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id", "im_start_token_id", "im_end_token_id"),
    *("system_token_id", "user_token_id", "assistant_token_id"),
)
_LONGEST = 1500
"""Positions that are encoded at a time: sounds are cut at windows, which do not see each other."""


def qwen2_5_omni_spec(config: HFConfig) -> ModelSpec:
    """Read the thinker of a `Qwen2_5OmniForConditionalGeneration`."""
    return whole_omni(config, qwen2_5_omni_thinker_spec)


def whole_omni(config: HFConfig, read: Callable[[HFConfig], ModelSpec]) -> ModelSpec:
    """The thinker of a model that speaks, too, which `read` makes of its settings."""
    config.ignore(*_SPEECH)
    config.expect("is_encoder_decoder", False)
    outer = {key: value for key in ("dtype", "torch_dtype") if (value := config.find(key, str)) is not None}
    model = read(config.section({**outer, **config.need("thinker_config", dict)}, "thinker_config"))
    ignored = (*model.names.ignored, r"(talker|token2wav|code2wav)\..*")
    prefixes = tuple((f"thinker.{given}", name) for given, name in (*model.names.prefixes, ("", "")))
    return replace(model, names=ModelNames(ignored=ignored, prefixes=prefixes))


def qwen2_5_omni_thinker_spec(config: HFConfig) -> ModelSpec:
    """Read a `Qwen2_5OmniThinkerForConditionalGeneration`."""
    text = config.text(*TOWERS)
    model = replace(qwen2_spec(text), names=multimodal_names("audio_tower", "visual"))

    def complete(audio: HFConfig, encoder: AudioEncoderSpec) -> AudioEncoderSpec:
        window = audio.size("n_window", 100)
        if window % 2 or not window <= min(encoder.num_positions, _LONGEST):
            known = f"even numbers up to {min(encoder.num_positions, _LONGEST)}"
            raise audio.unsupported("n_window", window, (known,))
        audio.expect("output_dim", model.hidden_size)
        check_sinusoids(audio, encoder.hidden_size)
        connector = (
            MergeSpec(mean=True),
            layer_norm("audio_tower.ln_post", encoder.hidden_size),
            ProjectionSpec("audio_tower.proj", encoder.hidden_size, model.hidden_size, bias=True),
        )
        longest = _LONGEST // window * window
        return replace(encoder, num_positions=longest, group=2, connector=connector, positions=None, window=window)

    model = replace(model, audio_encoder=read_encoder(config, complete))
    tower = read_tower(config, lambda vision: _vision_tower(vision, model.hidden_size))
    return model if tower is None else replace(with_axes(model, text, [16, 24, 24], interleaved=False), tower=tower)


def _vision_tower(vision: HFConfig, text_size: int) -> TowerSpec:
    vision.ignore("embed_dim")  # the hidden size again
    return qwen2_5_vision_tower(vision, text_size, qkv=("attn.q", "attn.k", "attn.v"))
