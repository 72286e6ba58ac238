"""Queries llguidance about single schemas."""

import functools
from typing import Any

from llguidance import LLMatcher, LLTokenizer


def matcher_of(schema: dict[str, Any]) -> LLMatcher:
    """A matcher, byte by byte, of the JSON that satisfies a schema."""
    return LLMatcher(_tokenizer(), LLMatcher.grammar_from_json_schema(schema), log_level=0)


def is_string_possible(constraints: list[dict[str, Any]]) -> bool:
    """Whether a string may satisfy all of these schemas; True also if llguidance cannot decide."""
    error = matcher_of({"type": "string", "allOf": constraints}).get_error()
    return not error.startswith("Unsatisfiable schema")


@functools.cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
