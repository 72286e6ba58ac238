"""Reads how a checkpoint transcribes. No torch.

config.json              sizes of a window
generation_config.json   ids of the tokens that control it; for old files without them, OpenAI's own
"""

from collections.abc import Mapping
from typing import Any

from penstock.checkpoint.checkpoint import Checkpoint, read_json
from penstock.config.audio_input import AudioInput
from penstock.errors import CheckpointError, shown

_LARGEST = 2**26
_ENGLISH_SIZE = 51864
"""Vocabulary of OpenAI's models that know English alone."""


def transcribes(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is a model that transcribes."""
    return checkpoint.config.get("model_type") == "whisper"


def read_audio_input(checkpoint: Checkpoint) -> AudioInput | None:
    """How a checkpoint transcribes; None: it does not.

    Raises:
        CheckpointError: a file or a setting is missing, or is not plausible.
    """
    if not transcribes(checkpoint):
        return None
    config, file = checkpoint.config, checkpoint.path / "generation_config.json"
    values = read_json(file) or {}

    def token(key: str, default: int | None = None) -> int | None:
        value = values.get(key, default)
        if value is not None and (type(value) is not int or not 0 <= value < _LARGEST):
            raise CheckpointError(f"{file}: {key} must be a token id, not {shown(value)}")
        return value

    def size(key: str, default: int) -> int:
        value = config.get(key, default)
        if type(value) is not int or not 0 < value < _LARGEST:
            raise CheckpointError(f"{checkpoint.config_file}: {key} must be a number above 0, not {shown(value)}")
        return value

    vocab, positions = size("vocab_size", 51865), size("max_source_positions", 1500)
    is_english = not values.get("is_multilingual", vocab > _ENGLISH_SIZE)
    start = _needed(
        token("decoder_start_token_id", config.get("decoder_start_token_id")), "decoder_start_token_id", file
    )
    end = _needed(next(iter(checkpoint.generation.eos_token_ids), None), "eos_token_id", file)
    no_timestamps = _needed(
        token("no_timestamps_token_id", 50362 if vocab <= _ENGLISH_SIZE else None), "no_timestamps_token_id", file
    )
    if no_timestamps + 2 > vocab:
        raise CheckpointError(f"{file}: no_timestamps_token_id leaves no timestamps in a vocabulary of {vocab}")
    tasks = _ids(values.get("task_to_id"), "task_to_id", file)
    languages = {
        name.removeprefix("<|").removesuffix("|>"): token_id
        for name, token_id in _ids(values.get("lang_to_id"), "lang_to_id", file).items()
    }
    return AudioInput(
        num_mels=size("num_mel_bins", 80),
        num_frames=2 * positions,
        frames_per_step=2,
        num_positions=positions,
        start=start,
        end=end,
        no_timestamps=no_timestamps,
        previous=token("prev_sot_token_id", no_timestamps - 2),
        languages=() if is_english else tuple(sorted(languages.items())),
        transcribe=None if is_english else tasks.get("transcribe"),
        translate=None if is_english else tasks.get("translate"),
        begin_suppress=_begin_suppress(values, config, vocab, file),
        max_initial_timestamp=token("max_initial_timestamp_index"),
    )


def _needed(token: int | None, key: str, file: object) -> int:
    if token is None:
        raise CheckpointError(f"{file} has no {key}, which transcription needs")
    return token


def _begin_suppress(values: Mapping[str, Any], config: Mapping[str, Any], vocab: int, file: object) -> tuple[int, ...]:
    """Tokens that no transcript begins with."""
    begin = values.get("begin_suppress_tokens", config.get("begin_suppress_tokens")) or []
    if not isinstance(begin, list) or not all(type(token) is int and 0 <= token < vocab for token in begin):
        raise CheckpointError(f"{file}: begin_suppress_tokens must be a list of token ids, not {shown(begin)}")
    return tuple(begin)


def _ids(given: Any, key: str, file: object) -> dict[str, int]:
    """An object of token ids by name; empty if there is none."""
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(
        type(number) is int and 0 <= number < _LARGEST for number in given.values()
    ):
        raise CheckpointError(f"{file}: {key} must be an object of token ids, not {shown(given)}")
    return given
