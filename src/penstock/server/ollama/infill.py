"""Prompts for text between two others, with the marks that a model was trained on (fill in the middle)."""

from penstock.errors import InvalidRequestError
from penstock.text.tokenizer import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""The marks before the prefix, before the suffix and after it: Qwen and CodeGemma, StarCoder, SantaCoder, DeepSeek,
Code Llama."""


def infill_marks(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """The token ids of the model's marks; None if it has none."""
    for texts in _MARKS:
        before, between, after = map(tokenizer.special_token, texts)
        if before is not None and between is not None and after is not None:
            return before, between, after
    return None


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Token ids of a prompt whose answer belongs between two texts.

    Raises:
        InvalidRequestError: the model has no marks for that.
    """
    marks = infill_marks(tokenizer)
    if marks is None:
        raise InvalidRequestError(
            "suffix: this model's tokenizer has no marks for text in the middle: leave it out", "suffix"
        )
    before, between, after = marks
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
    return [*tokenizer.encode(""), before, *first, between, *second, after]
