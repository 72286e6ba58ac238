"""Settings of a tokenizer without tokenizer.json, from the configs of its folder; for all forms of vocabulary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

MAX_TOKENS = 2**20
"""Maximum number of tokens of a vocabulary; the largest in use have 262,144."""
_MAX_ADDED_TOKENS = 2**16
_MAX_ID = 2**31


@dataclass(frozen=True, slots=True)
class Converted:
    """A tokenizer converted from another form."""

    backend: Tokenizer
    special: Mapping[str, str]
    """Texts of bos_token, eos_token and so on where the configs do not name them."""
    add_bos: bool = False
    """Whether texts begin with BOS where the configs do not say (`add_bos_token`)."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder and the contents of its configs."""

    path: Path
    config: Mapping[str, Any]
    """tokenizer_config.json, with the special and added tokens of older checkpoints."""
    model_config: Mapping[str, Any]
    """config.json."""

    @property
    def tokenizer_class(self) -> str | None:
        """The tokenizer's class without the ending Fast; None if neither config names one."""
        named = self.config.get("tokenizer_class") or self.model_config.get("tokenizer_class")
        return named.removesuffix("Fast") if isinstance(named, str) else None

    def setting(self, name: str) -> bool | None:
        """A boolean of tokenizer_config.json; None if it is not set.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.config.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise CheckpointError(
            f"{name} in tokenizer_config.json of {self.path} must be true or false, not {shown(value)}"
        )

    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that the configs add to the vocabulary.

        Raises:
            CheckpointError: the configs list them in an unknown form.
        """
        listed = self.config.get("added_tokens_decoder") or {}
        try:
            found = {entry["content"]: int(token) for token, entry in listed.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._unknown_form(f"{type(error).__name__}: {error}") from error
        for text, token in found.items():
            if not isinstance(text, str) or not 0 <= token < _MAX_ID:
                raise self._unknown_form(f"{shown(text)} with id {token}")
        return found

    def _unknown_form(self, what: str) -> CheckpointError:
        return CheckpointError(f"tokenizer_config.json in {self.path} lists tokens in a form that is not known: {what}")


def with_added_tokens(vocabulary: dict[str, int], added: Mapping[str, int], file: Path) -> dict[str, int]:
    """The vocabulary with added tokens at their ids.

    Raises:
        CheckpointError: two tokens would have one id, or one token two; or there are too many.
    """
    merged = {**vocabulary, **added}
    if len(merged) > MAX_TOKENS or len(added) > _MAX_ADDED_TOKENS:
        raise CheckpointError(
            f"{file} and the configs beside it have {len(merged)} tokens, {len(added)} of them added; at most "
            f"{MAX_TOKENS} and {_MAX_ADDED_TOKENS} are read"
        )
    for text, token in added.items():
        if vocabulary.get(text, token) != token:
            raise CheckpointError(f"{shown(text)} has id {vocabulary[text]} in {file}, but {token} in the configs")
    # Two tokens with one id: the search for them takes long, so it is made only then.
    if len(set(merged.values())) < len(merged):
        texts: dict[int, str] = {}
        for text, token in merged.items():
            if token in texts:
                raise CheckpointError(
                    f"{file} is damaged: {shown(texts[token])} and {shown(text)} both have id {token}"
                )
            texts[token] = text
    return merged


def put_around(converted: Converted, folder: Folder, special: Mapping[str, str]) -> None:
    """Have the tokenizer put BOS and EOS around texts, as `add_bos_token` and `add_eos_token` say.

    Raises:
        CheckpointError: they ask for a token that is not defined.
    """
    backend = converted.backend
    # The form itself says what goes around texts.
    if backend.post_processor is not None:
        return
    ids: dict[str, int] = {}
    for name, default in (("bos_token", converted.add_bos), ("eos_token", False)):
        wanted = folder.setting(f"add_{name}")
        token = backend.token_to_id(special[name]) if name in special else None
        if wanted and token is None:
            raise CheckpointError(
                f"add_{name} is true in tokenizer_config.json of {folder.path}, which defines no {name}"
            )
        if token is not None and (default if wanted is None else wanted):
            ids[name] = token
    if ids:
        before, after = ("bos_token:0 " if "bos_token" in ids else ""), (" eos_token:0" if "eos_token" in ids else "")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{before}$A:0{after}", special_tokens=list(ids.items())
        )


def add_special(backend: Tokenizer, texts: "list[str]") -> None:
    """Mark tokens of the vocabulary as special."""
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
