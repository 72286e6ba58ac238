"""Special and added tokens of a checkpoint, as its tokenizer_config.json names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.errors import CheckpointError, shown

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def special_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The texts of the special tokens by their names: bos_token, eos_token and so on.

    Raises:
        CheckpointError: one is neither a text nor an object with a text.
    """
    return {name: text for name in _SPECIAL if (text := _special_token(config, name, folder)) is not None}


def splits_special(config: Mapping[str, Any], folder: Path) -> bool:
    """Whether special tokens in a text are tokenised as ordinary text (`split_special_tokens`)."""
    splits = config.get("split_special_tokens")
    if splits not in (None, True, False):
        raise CheckpointError(
            f"split_special_tokens in tokenizer_config.json of {folder} must be true or false, not {shown(splits)}"
        )
    return bool(splits)


def _content(token: Any) -> str | None:
    """The text of a special token, a string or an object in the config."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_token(config: Mapping[str, Any], name: str, folder: Path) -> str | None:
    text = _content(config.get(name))
    if text is None and config.get(name) is not None:
        raise CheckpointError(
            f"{name} in tokenizer_config.json of {folder} must be a text, or an object with its text as content, not "
            f"{shown(config[name])}"
        )
    return text


def add_missing_tokens(backend: Backend, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens that the configs name and tokenizer.json lacks, in the order of their ids; special ones are marked so."""
    listed = config.get("added_tokens_decoder") or {}
    names = [*special.values(), *_extra_special(config)]
    present = backend.get_added_tokens_decoder().values()
    known, marked = {token.content for token in present}, {token.content for token in present if token.special}
    missing = []
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        flags = {key: value for key, value in entry.items() if key in _FLAGS}
        if flags["content"] not in known:
            flags["special"] = bool(flags.get("special")) or flags["content"] in names
            missing.append(AddedToken(**flags))
            marked.add(flags["content"])
    backend.add_tokens(missing)  # at once: each call takes time in proportion to all tokens
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names if name not in marked]
    )


def _extra_special(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    tokens = listed.values() if isinstance(listed, Mapping) else listed
    return [text for token in tokens if (text := _content(token)) is not None]
