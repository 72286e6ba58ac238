"""Converts tiktoken's files, a line `base64 rank` a token: those of Kimi and Qwen 1, whose patterns are known."""

from collections.abc import Mapping
from pathlib import Path

from penstock.checkpoint.checkpoint import read_text
from penstock.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZATIONS
from penstock.errors import CheckpointError, shown
from penstock.text.vocabularies.form import Converted, Folder, add_special
from penstock.text.vocabularies.ranks import MAX_BYTES, bpe_of_ranks, decode_token

KIMI, QWEN = "tiktoken.model", "qwen.tiktoken"
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{place}|>" for place in range(205)))
_KIMI_SPECIAL = 256
"""Special tokens of Kimi's tokenizers, most of them reserved."""


def convert_qwen(folder: Folder) -> Converted:
    """Convert qwen.tiktoken.

    Raises:
        CheckpointError: the file is too large or damaged.
    """
    file = folder.path / QWEN
    ranks = _read_ranks(file)
    special = {text: len(ranks) + place for place, text in enumerate(_QWEN_SPECIAL)}
    return _converted(ranks, special, "qwen2", {"eos_token": "<|endoftext|>"}, file)


def convert_kimi(folder: Folder) -> Converted:
    """Convert tiktoken.model of Kimi's class TikTokenTokenizer.

    Raises:
        CheckpointError: the file is too large or damaged, or of another class, whose pattern is not known.
    """
    file = folder.path / KIMI
    if folder.tokenizer_class != "TikTokenTokenizer":
        raise CheckpointError(
            f"{file} needs a pattern, which is known for tokenizer_class TikTokenTokenizer (Kimi) only, not for "
            f"{shown(folder.tokenizer_class)}"
        )
    ranks = _read_ranks(file)
    names = {token: text for text, token in folder.added_tokens().items()}
    ids = range(len(ranks), len(ranks) + _KIMI_SPECIAL)
    special = {names.pop(token, f"<|reserved_token_{token}|>"): token for token in ids}
    if names or len(special) < _KIMI_SPECIAL:
        raise CheckpointError(
            f"added_tokens_decoder in tokenizer_config.json of {folder.path} must name different tokens with ids "
            f"{ids[0]} to {ids[-1]}, which follow those of {KIMI}"
        )
    return _converted(ranks, special, "kimi-k2", {"bos_token": "[BOS]", "eos_token": "[EOS]"}, file)


def _converted(
    ranks: Mapping[bytes, int], special: Mapping[str, int], pre: str, names: Mapping[str, str], file: Path
) -> Converted:
    backend = bpe_of_ranks(ranks, special, 0, file)
    cut = PRE_TOKENIZATIONS[pre]
    backend.pre_tokenizer = cut.pre_tokenizer()
    if (normalizer := cut.normalizer()) is not None:
        backend.normalizer = normalizer
    add_special(backend, list(special))
    return Converted(backend, {name: text for name, text in names.items() if text in special})


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for line in (read_text(file, MAX_BYTES) or "").splitlines():
        token, _, rank = line.partition(" ")
        if rank != str(len(ranks)):
            raise CheckpointError(
                f"{file} cannot be read as a tiktoken file: line {len(ranks) + 1} must be a token in base64 and the "
                f"rank {len(ranks)}, not {shown(line)}"
            )
        ranks[decode_token(token, file)] = len(ranks)
    return ranks
