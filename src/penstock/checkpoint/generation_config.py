"""Reads `generation_config.json`: the checkpoint's defaults for what a request leaves unset.

Each key is either read, or known to change no answer of a causal model, or reported (`unheeded`).
"""

from pathlib import Path
from typing import Any

from penstock.api.sampling_params import MAX_BAD_WORDS, MAX_BIAS
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

_MAX_TOKEN_ID = 2**31 - 1
_MAX_SEQUENCE = 64
"""Maximum tokens of one sequence in `bad_words_ids`."""

_READ = {
    *("eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("stop_strings", "max_new_tokens", "min_new_tokens", "suppress_tokens", "bad_words_ids"),
}
_HARMLESS = {
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_commit_hash"),
    *("_from_model_config", "trust_remote_code"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_type"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    "renormalize_logits",  # the last step before sampling: it changes no order and no probability
    "remove_invalid_values",  # a request with NaN in its logits ends with an error
    "forced_bos_token_id",  # acts on prompts of one token only
    *("length_penalty", "early_stopping", "diversity_penalty"),  # of beam search: `num_beams` is reported
}
_TRANSCRIPTION = {
    *("begin_suppress_tokens", "lang_to_id", "task_to_id", "is_multilingual", "max_initial_timestamp_index"),
    *("no_timestamps_token_id", "prev_sot_token_id"),  # `checkpoint/audio_input.py` reads these
    *("forced_decoder_ids", "language", "task", "return_timestamps", "max_length"),  # a request says it
    *("alignment_heads", "median_filter_width"),  # of the times of words, which are not computed
}
"""Keys of models that transcribe."""
_NEUTRAL: tuple[object, ...] = (None, False, 0, 1, [], {})
_NEUTRAL_OF: dict[str, tuple[object, ...]] = {
    "max_length": (None, 20),  # the default of `transformers`, which older files spell out
    "forced_eos_token_id": (None,),
}
"""Values with which a key has no effect, if they differ from `_NEUTRAL`."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of `SamplingParams`, under the same names; None: not stated by the checkpoint."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a text, from `generation_config.json`, or else from `config.json` or its `text_config`."""
    temperature: float | None = None
    """0.0 if the file says `do_sample: false`."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    """`stop_strings`."""
    max_tokens: int | None = None
    """`max_new_tokens`."""
    min_tokens: int = 0
    """`min_new_tokens`."""
    bad_token_ids: tuple[int, ...] = ()
    """`suppress_tokens`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """`bad_words_ids`: sequences of tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """`sequence_bias`, of single tokens."""

    @property
    def has_sampling(self) -> bool:
        """Whether any sampling control is set; penalties do not count."""
        controls = (self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
        return any(value is not None for value in controls)


def read_defaults(
    generation: dict[str, Any], config: dict[str, Any], file: Path, config_file: Path
) -> GenerationDefaults:
    """Read the defaults.

    Args:
        generation: content of `generation_config.json`, and `file` its path.
        config: content of `config.json`, which may name the end tokens, and `config_file` its path.

    Raises:
        CheckpointError: a value has the wrong type.
    """
    eos, eos_file = generation.get("eos_token_id"), file
    for values in (config, config.get("text_config")):
        if eos is None and isinstance(values, dict):
            eos, eos_file = values.get("eos_token_id"), config_file
    sampled = generation.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise CheckpointError(f"do_sample in {file} must be true or false, not {shown(sampled)}")
    return GenerationDefaults(
        eos_token_ids=_token_ids("eos_token_id", eos, eos_file),
        temperature=0.0 if sampled is False else _number(generation, "temperature", file),
        top_k=_whole(generation, "top_k", file),
        top_p=_number(generation, "top_p", file),
        min_p=_number(generation, "min_p", file),
        typical_p=_number(generation, "typical_p", file),
        repetition_penalty=_number(generation, "repetition_penalty", file),
        stop=_stop_strings(generation.get("stop_strings"), file),
        max_tokens=_whole(generation, "max_new_tokens", file),
        min_tokens=_whole(generation, "min_new_tokens", file) or 0,
        bad_token_ids=_token_ids("suppress_tokens", generation.get("suppress_tokens"), file),
        bad_words=_sequences(generation.get("bad_words_ids"), file),
        logit_bias=_single_biases(generation.get("sequence_bias")) or (),
    )


def unheeded(generation: dict[str, Any], *, transcribes: bool = False) -> tuple[str, ...]:
    """Keys that change, or may change, the answers of `transformers` but not Penstock's.

    Args:
        transcribes: whether the model transcribes audio.
    """
    known = _READ | _HARMLESS | (_TRANSCRIPTION if transcribes else set())
    if _single_biases(generation.get("sequence_bias")) is not None:
        known = known | {"sequence_bias"}
    return tuple(
        sorted(
            key for key, value in generation.items() if key not in known and value not in _NEUTRAL_OF.get(key, _NEUTRAL)
        )
    )


def _token_ids(key: str, given: Any, file: Path) -> tuple[int, ...]:
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(_is_token(token) for token in ids):
        raise CheckpointError(f"{key} in {file} must be a token id from 0 on or a list of them, not {shown(given)}")
    return tuple(ids)


def _is_token(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _MAX_TOKEN_ID


def _stop_strings(given: Any, file: Path) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"stop_strings in {file} must be a text or a list of texts, not {shown(given)}")
    return tuple(texts)


def _sequences(given: Any, file: Path) -> tuple[tuple[int, ...], ...]:
    listed = given or []
    if not isinstance(listed, list) or not all(
        isinstance(sequence, list) and all(map(_is_token, sequence)) for sequence in listed
    ):
        raise CheckpointError(f"bad_words_ids in {file} must be a list of lists of token ids, not {shown(given)}")
    if len(listed) > MAX_BAD_WORDS or any(len(sequence) > _MAX_SEQUENCE for sequence in listed):
        raise CheckpointError(
            f"bad_words_ids in {file} may have {MAX_BAD_WORDS} sequences of {_MAX_SEQUENCE} tokens at most"
        )
    return tuple(tuple(sequence) for sequence in listed if sequence)


def _single_biases(given: Any) -> tuple[tuple[int, float], ...] | None:
    """A `sequence_bias` of single tokens, within the bounds of `logit_bias`; None: it has another form."""
    found = []
    for entry in given if isinstance(given, list) else [] if given is None else [None]:
        match entry:
            case [[int() as token], (int() | float()) as bias] if _is_token(token) and abs(bias) <= MAX_BIAS:
                found.append((token, float(bias)))
            case _:
                return None
    return tuple(found)


def _whole(generation: dict[str, Any], key: str, file: Path) -> int | None:
    value = _number(generation, key, file)
    if value is not None and value != int(value):
        raise CheckpointError(f"{key} in {file} must be a whole number, not {value!r}")
    return None if value is None else int(value)


def _number(generation: dict[str, Any], key: str, file: Path) -> float | None:
    value = generation.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _MAX_TOKEN_ID:  # or NaN
        raise CheckpointError(
            f"{key} in {file} must be a number from {-_MAX_TOKEN_ID} to {_MAX_TOKEN_ID}, not {shown(value)}"
        )
    return value
