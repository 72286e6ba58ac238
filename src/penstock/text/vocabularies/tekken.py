"""Converts tekken.json, the form of `mistral_common`: a pattern, tokens with ranks, special tokens."""

from pathlib import Path

import msgspec
from tokenizers import Regex, pre_tokenizers

from penstock.checkpoint.checkpoint import read_text
from penstock.errors import CheckpointError
from penstock.text.vocabularies.form import Converted, Folder, add_special
from penstock.text.vocabularies.ranks import MAX_BYTES, bpe_of_ranks, decode_token

TEKKEN = "tekken.json"
_MAX_PATTERN = 4096
_MAX_SPECIAL = 2**16
_EARLY_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files up to version 7, which do not list them."""
_EARLY_VERSIONS = ("v1", "v2", "v3", "v7")


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _SpecialToken(msgspec.Struct):
    rank: int
    token_str: str


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str


class _Tekken(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_SpecialToken] | None = None


def convert_tekken(folder: Folder) -> Converted:
    """Convert tekken.json.

    Raises:
        CheckpointError: the file is too large or damaged.
    """
    file = folder.path / TEKKEN
    try:
        content = msgspec.json.decode(read_text(file, MAX_BYTES) or "", type=_Tekken)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as Mistral's tekken.json: {error}") from error
    special = _special(content, file)
    kept = content.config.default_vocab_size - content.config.default_num_special_tokens
    tokens = sorted((token for token in content.vocab if token.rank < kept), key=lambda token: token.rank)
    if [token.rank for token in tokens] != list(range(kept)):
        raise CheckpointError(f"{file} is damaged: the ranks of its vocabulary must be 0 to {kept - 1}, each once")
    ranks = {decode_token(token.token_bytes, file): token.rank for token in tokens}
    if len(ranks) < kept:
        raise CheckpointError(f"{file} is damaged: some of its {kept} tokens are equal")
    backend = bpe_of_ranks(ranks, special, content.config.default_num_special_tokens, file)
    backend.pre_tokenizer = _pre_tokenizer(content.config.pattern, file)
    add_special(backend, list(special))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return Converted(backend, {name: text for name, text in names.items() if text in special}, add_bos=True)


def _special(content: _Tekken, file: Path) -> dict[str, int]:
    """Ids of the special tokens; unnamed ones are called <SPECIAL_17> and so on, as in `mistral_common`."""
    count, version = content.config.default_num_special_tokens, content.config.version
    if not 0 <= count <= _MAX_SPECIAL:
        raise CheckpointError(f"default_num_special_tokens in {file} is {count}; it must be 0 to {_MAX_SPECIAL}")
    if content.special_tokens is None and version not in _EARLY_VERSIONS:
        raise CheckpointError(f"{file} has no special_tokens, which its version {version!r} must list")
    listed = content.special_tokens
    names = dict(enumerate(_EARLY_SPECIAL)) if listed is None else {token.rank: token.token_str for token in listed}
    if (listed is not None and len(names) < len(listed)) or any(not 0 <= rank < count for rank in names):
        raise CheckpointError(f"special_tokens in {file} must have ranks 0 to {count - 1}, each at most once")
    special = {names.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(count)}
    if len(special) < count:
        raise CheckpointError(f"special_tokens in {file} must have different texts")
    return special


def _pre_tokenizer(pattern: str, file: Path) -> pre_tokenizers.PreTokenizer:
    if len(pattern) > _MAX_PATTERN:
        raise CheckpointError(f"pattern in {file} has {len(pattern)} characters; at most {_MAX_PATTERN} are read")
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"pattern in {file} is not a regular expression: {error}") from error
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
