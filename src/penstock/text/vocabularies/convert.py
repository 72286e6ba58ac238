"""Finds the vocabulary of a folder without tokenizer.json, and converts it."""

from collections.abc import Callable
from pathlib import Path

from penstock.text.vocabularies.form import Converted, Folder
from penstock.text.vocabularies.sentencepiece import SENTENCEPIECE, convert_sentencepiece
from penstock.text.vocabularies.tekken import TEKKEN, convert_tekken
from penstock.text.vocabularies.tiktoken import KIMI, QWEN, convert_kimi, convert_qwen
from penstock.text.vocabularies.vocab_json import MERGES, VOCAB, convert_vocab_json

_FORMS: tuple[tuple[tuple[str, ...], Callable[[Folder], Converted]], ...] = (
    ((VOCAB, MERGES), convert_vocab_json),
    ((TEKKEN,), convert_tekken),
    ((QWEN,), convert_qwen),
    ((KIMI,), convert_kimi),
    *(((name,), convert_sentencepiece) for name in SENTENCEPIECE),
)
"""Files of each form with its converter; of several the first counts."""


def convertible(folder: Path) -> Callable[[Folder], Converted] | None:
    """The converter of the vocabulary in a folder; None: it has none that can be converted."""
    for names, convert in _FORMS:
        if all((folder / name).exists() for name in names):
            return convert
    return None
