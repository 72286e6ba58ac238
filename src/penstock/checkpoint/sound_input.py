"""Reads how a checkpoint takes sounds in prompts. No torch.

config.json                the family, the ids of placeholder tokens, sizes of the encoder
preprocessor_config.json   length of the longest sound
processor_config.json      the same in newer checkpoints, within `feature_extractor`
mmproj*.gguf               config.json's part of this, beside a GGUF file of a text model
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.checkpoint import Checkpoint, read_json
from penstock.config.audio_input import FRAMES_PER_SECOND
from penstock.config.sound_input import STRIDE, SoundInput
from penstock.errors import CheckpointError, shown

_LARGEST = 2**26
_LONGEST = 3000
"""Frames of a window of 30 seconds."""
_LONGEST_SECONDS = 300
"""Of a sound for Qwen2.5-Omni, whose extractor of features has the setting."""


def read_sound_input(checkpoint: Checkpoint) -> SoundInput | None:
    """How a checkpoint takes sounds in prompts; None if it does not, or if sounds of its family are not supported.

    Raises:
        CheckpointError: a setting is missing, or is not plausible.
    """
    read = _FAMILIES.get(str(checkpoint.config.get("model_type")))
    if read is None or (checkpoint.gguf is not None and checkpoint.media is None):
        return None
    return read(checkpoint.config, checkpoint)


def unsupported_encoder(checkpoint: Checkpoint) -> str | None:
    """The kind of an audio encoder that the checkpoint has and Penstock does not; None: there is none."""
    audio = checkpoint.config.get("audio_config")
    if not isinstance(audio, dict) or str(checkpoint.config.get("model_type")) in _FAMILIES:
        return None
    return str(audio.get("model_type", checkpoint.config.get("model_type")))[:64]


def _number(values: Mapping[str, Any], checkpoint: Checkpoint, *keys: str, default: int | None = None) -> int:
    """The number at the first of these keys that is set.

    Raises:
        CheckpointError: it is missing, or is no plausible number.
    """
    value = next((values[key] for key in keys if values.get(key) is not None), default)
    if value is None:
        raise CheckpointError(f"{checkpoint.config_file} has no {keys[0]}, which sounds in prompts need")
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise CheckpointError(
            f"{checkpoint.config_file}: {keys[0]} must be a number from 0 to {_LARGEST}, not {shown(value)}"
        )
    return value


def _audio(values: Mapping[str, Any]) -> Mapping[str, Any]:
    given = values.get("audio_config")
    return given if isinstance(given, dict) else {}


def _qwen2_audio(values: Mapping[str, Any], checkpoint: Checkpoint) -> SoundInput:
    audio = _audio(values)
    frames = STRIDE * _number(audio, checkpoint, "max_source_positions", default=_LONGEST // STRIDE)
    return SoundInput(
        num_mels=_number(audio, checkpoint, "num_mel_bins", default=128),
        window_frames=frames,
        group=2,
        placeholder=_number(values, checkpoint, "audio_token_index", "audio_token_id", default=151646),
        margin=2,
        begin="<|audio_bos|>",
        end="<|audio_eos|>",
        max_frames=frames,
    )


def _audio_flamingo3(values: Mapping[str, Any], checkpoint: Checkpoint) -> SoundInput:
    """Its windows are Qwen2-Audio's, and its longest sound has 20 of them."""
    placeholder = _number(values, checkpoint, "audio_token_id", default=151669)
    one = _qwen2_audio(values, checkpoint)
    return replace(one, placeholder=placeholder, begin="", end="", max_frames=20 * one.window_frames)


def _voxtral(values: Mapping[str, Any], checkpoint: Checkpoint) -> SoundInput:
    audio = _audio(values)
    return SoundInput(
        num_mels=_number(audio, checkpoint, "num_mel_bins", default=128),
        window_frames=STRIDE * _number(audio, checkpoint, "max_source_positions", default=_LONGEST // STRIDE),
        group=4,
        placeholder=_number(values, checkpoint, "audio_token_id", default=24),
        filled=True,
        begin="[BEGIN_AUDIO]",
    )


def _qwen2_5_omni(values: Mapping[str, Any], checkpoint: Checkpoint) -> SoundInput:
    thinker = _thinker(values, checkpoint)
    audio = _audio(thinker)
    window = STRIDE * max(1, _number(audio, checkpoint, "n_window", default=100))
    return SoundInput(
        num_mels=_number(audio, checkpoint, "num_mel_bins", default=128),
        window_frames=max(1, _LONGEST // window) * window,
        group=2,
        placeholder=_number(thinker, checkpoint, "audio_token_index", "audio_token_id", default=151646),
        begin="<|audio_bos|>",
        end="<|audio_eos|>",
        max_frames=FRAMES_PER_SECOND * _longest_seconds(checkpoint),
    )


def _qwen3_omni(values: Mapping[str, Any], checkpoint: Checkpoint) -> SoundInput:
    thinker = _thinker(values, checkpoint)
    audio = _audio(thinker)
    window = max(1, _number(audio, checkpoint, "n_window_infer", default=800))
    return SoundInput(
        num_mels=_number(audio, checkpoint, "num_mel_bins", default=128),
        window_frames=max(1, _LONGEST // window) * window,
        group=1,
        placeholder=_number(thinker, checkpoint, "audio_token_id", default=151646),
        chunk=STRIDE * max(1, _number(audio, checkpoint, "n_window", default=50)),
        bare=True,
        begin="<|audio_start|>",
        end="<|audio_end|>",
    )


def _thinker(values: Mapping[str, Any], checkpoint: Checkpoint) -> Mapping[str, Any]:
    thinker = values.get("thinker_config", values)
    if not isinstance(thinker, Mapping):
        raise CheckpointError(f"{checkpoint.config_file}: thinker_config must be an object, not {shown(thinker)}")
    return thinker


def _longest_seconds(checkpoint: Checkpoint) -> int:
    """Seconds of the longest sound, which the feature extractor does not cut."""
    if checkpoint.media is not None:
        return _number(checkpoint.media.processor, checkpoint, "chunk_length", default=_LONGEST_SECONDS)
    newer = (read_json(checkpoint.path / "processor_config.json") or {}).get("feature_extractor")
    found = newer if isinstance(newer, Mapping) else read_json(checkpoint.path / "preprocessor_config.json") or {}
    return max(1, _number(found, checkpoint, "chunk_length", default=_LONGEST_SECONDS))


_FAMILIES: dict[str, Callable[[Mapping[str, Any], Checkpoint], SoundInput]] = {
    "audioflamingo3": _audio_flamingo3,
    "qwen2_audio": _qwen2_audio,
    "voxtral": _voxtral,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen2_5_omni_thinker": _qwen2_5_omni,
    "qwen3_omni_moe": _qwen3_omni,
    "qwen3_omni_moe_thinker": _qwen3_omni,
}
"""By `model_type` of config.json."""
