"""The vocabulary of a GGUF file: token texts, token types and special tokens."""

from array import array
from collections.abc import Sequence
from typing import Any

from penstock.checkpoint.gguf.file import Metadata
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of `tokenizer.ggml.token_type`; unused tokens (5) and byte tokens (6) need no special treatment."""

_TEXTS, _KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_MODEL, _NO_MODEL = "tokenizer.ggml.model", (None, "none", "no_vocab")
_MODELS = ("gpt2", "llama", "gemma4", "bert", "t5")
_MOST_TOKENS = 2**31
_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # GGUF's own spelling
    "pad_token": "tokenizer.ggml.padding_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_END_TEXTS = {
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<|end|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "[e~["),
    "<｜end▁of▁sentence｜>",
}
"""Tokens that end a turn or a text: files declare one of them, but models generate the others, too."""
_MESSAGE_ENDS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""Tokens that end a turn of gpt-oss, and of Solar Open, where `<|end|>` only closes one of its messages."""
_SENTENCEPIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
"""SentencePiece's default ids, for files that do not state them."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file."""

    model: str
    """gpt2: byte-level BPE; llama: SentencePiece BPE by scores; gemma4: SentencePiece BPE by merges; bert: WordPiece;
    t5: SentencePiece unigram.
    """
    texts: Sequence[str]
    """Texts by token id, without duplicates."""
    ids: dict[str, int]
    """Token ids by text."""
    kinds: Sequence[int]
    special: dict[str, int]
    """Token ids of bos_token, eos_token and so on."""

    def of_kind(self, *kinds: int) -> list[str]:
        places = set[int]().union(*(_places(self.kinds, kind) for kind in kinds))
        return [self.texts[place] for place in sorted(places)]


def has_vocabulary(metadata: Metadata) -> bool:
    """Whether the file has a vocabulary, which is not read.

    Raises:
        CheckpointError: its tokenizer model is unsupported.
    """
    return _model(metadata) is not None


def _model(metadata: Metadata) -> str | None:
    model = metadata.find(_MODEL, str)
    if model in _NO_MODEL:
        return None
    if model not in _MODELS:
        raise CheckpointError(
            f"{_MODEL} {shown(model)} in {metadata.file} is not supported; supported: {', '.join(_MODELS)}"
        )
    return model


def read_vocabulary(metadata: Metadata) -> Vocabulary | None:
    """Read the vocabulary; None if the file has none, so that only token ids can be used.

    Raises:
        CheckpointError: the vocabulary is damaged, or its tokenizer model is unsupported.
    """
    model = _model(metadata)
    if model is None:
        return None
    texts = metadata.strings(_TEXTS)
    if not texts:
        raise CheckpointError(f"{metadata.file} lacks {_TEXTS}")
    texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]  # llama.cpp's name for empty texts
    ids = _ids(metadata, texts)
    kinds = _per_token(metadata, _KINDS, "iI", len(texts)) or array("i", [NORMAL]) * len(texts)
    defaults = _SENTENCEPIECE_IDS if model == "llama" else {}
    return Vocabulary(model, texts, ids, kinds, _special(metadata, len(texts), defaults))


def _ids(metadata: Metadata, texts: list[str]) -> dict[str, int]:
    """The token ids by text; each text must be unique."""
    ids = {text: token for token, text in enumerate(texts)}
    if len(ids) < len(texts):
        first, text = next((token, text) for token, text in enumerate(texts) if ids[text] != token)
        raise CheckpointError(f"{metadata.file} is damaged: its tokens {first} and {ids[text]} are both {shown(text)}")
    return ids


def _per_token(metadata: Metadata, key: str, codes: str, count: int) -> "array[Any] | None":
    values = metadata.numbers(key, codes)
    if values is not None and len(values) != count:
        raise CheckpointError(f"{key} in {metadata.file} has {len(values)} entries for {count} tokens")
    return values


def _special(metadata: Metadata, count: int, defaults: dict[str, int]) -> dict[str, int]:
    found = {name: token for name, token in defaults.items() if token < count}
    for name, key in _SPECIAL.items():
        token = _token_id(metadata, key, count)
        if token is not None:
            found[name] = token
    return found


def _token_id(metadata: Metadata, key: str, count: int) -> int | None:
    token = metadata.find(key, int)
    if token is None or 0 <= token < count:
        return token
    if key == _SPECIAL["pad_token"]:  # some files name a token that was never added; padding is never used
        return None
    raise CheckpointError(f"{key} in {metadata.file} is {token}, but there are {count} tokens")


def _places(kinds: Sequence[int], wanted: int) -> list[int]:
    """The tokens of a kind. Each opening of a file asks, and a loop over 150,000 tokens takes 10 ms."""
    import numpy as np  # here: most commands read no GGUF file

    found: list[int] = np.flatnonzero(np.asarray(kinds) == wanted).tolist()
    return found


def scores_of(metadata: Metadata, vocabulary: Vocabulary) -> "array[Any]":
    """The SentencePiece score of each token.

    Raises:
        CheckpointError: the scores are missing, or some are NaN.
    """
    scores = _per_token(metadata, "tokenizer.ggml.scores", "fd", len(vocabulary.texts))
    if scores is None:
        raise CheckpointError(f"{metadata.file} lacks tokenizer.ggml.scores, which a SentencePiece vocabulary needs")
    if any(score != score for score in scores):
        raise CheckpointError(f"tokenizer.ggml.scores in {metadata.file} holds NaN")
    return scores


def end_token_ids(metadata: Metadata) -> list[int]:
    """The ids of end-of-text tokens, the file's own EOS first. Raises as `read_vocabulary` does."""
    model = metadata.find(_MODEL, str)
    texts = None if model in _NO_MODEL else metadata.string_array(_TEXTS)
    if texts is None:
        named = [_token_id(metadata, key, _MOST_TOKENS) for key in _ENDS]
        return list(dict.fromkeys(token for token in named if token is not None))
    named = [_token_id(metadata, key, len(texts)) for key in _ENDS]
    if named[0] is None and model == "llama":
        named[0] = _SENTENCEPIECE_IDS["eos_token"]
    kinds = _per_token(metadata, _KINDS, "iI", len(texts)) or ()
    # converters have marked tokens such as <|im_end|> as user-defined, too
    marked = metadata.some_strings(_TEXTS, {*_places(kinds, CONTROL), *_places(kinds, USER_DEFINED)})
    of_turn = next((ends for ends in _MESSAGE_ENDS if ends.issubset(marked.values())), set())
    texts_of_ends = _END_TEXTS | of_turn
    ends = [token for token, text in marked.items() if text in texts_of_ends]
    ends = [token for token in ends if kinds[token] == CONTROL or marked[token] != "</s>"]  # Gemma's HTML tag
    found = dict.fromkeys(token for token in [*named, *ends] if token is not None)
    return [token for token in found if not (of_turn and marked.get(token) == "<|end|>")]


def suppressed_token_ids(metadata: Metadata) -> list[int]:
    """The ids of tokens that are never sampled. Raises as `read_vocabulary` does."""
    found = metadata.numbers("tokenizer.ggml.suppress_tokens", "iI") or ()
    texts = metadata.string_array(_TEXTS)
    return [token for token in found if 0 <= token < (_MOST_TOKENS if texts is None else len(texts))]
