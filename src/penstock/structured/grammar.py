"""From the form that a request asks for to a matcher of the library, or to words that say why it cannot be had.

Documents of JSON are written in one line, with a space after each colon and comma, as `json.dumps` and chat templates
write them: whitespace that could be any would leave a grammar nothing to force, and a small model a way never to end.
"""

import json

from llguidance import LLMatcher, LLParserLimits

from penstock.errors import InvalidRequestError
from penstock.parsers.grammar import JSON_OPTIONS
from penstock.sampling_params import Structured
from penstock.structured.vocabulary import Vocabulary

MAX_CHARACTERS = 2**18
"""Of a schema, a grammar, or all choices together."""
MAX_CHOICES = 2000
MAX_PATTERN = 2**13
"""Characters of a regular expression."""
MAX_REASON = 500
LIMITS = LLParserLimits(verbose_errors=False)
"""The library's own on how much work one mask may be; these fail only the sequence that it was for."""


def compile_grammar(vocabulary: Vocabulary, structured: Structured) -> LLMatcher:
    """A matcher at its start, to be copied for each sequence.

    It may take long: seconds of one core for some schemas of a few hundred bytes, hours for a few.

    Raises:
        InvalidRequestError: the form is too large, malformed, satisfied by nothing, or asks for what the library cannot
            do; the message says which.
    """
    _check_size(structured)
    try:
        matcher = LLMatcher(vocabulary.library, _source(structured), log_level=0, limits=LIMITS)
    except (ValueError, RecursionError) as error:  # malformed JSON
        raise refusal(structured, str(error)) from error
    if matcher.is_error():
        raise refusal(structured, matcher.get_error())
    return matcher


def _check_size(structured: Structured) -> None:
    size = len(structured.text) + sum(map(len, structured.choices))
    most = MAX_PATTERN if structured.kind == "regex" else MAX_CHARACTERS
    if size > most:
        raise refusal(structured, f"it has {size} characters; at most {most}")
    if len(structured.choices) > MAX_CHOICES:
        raise refusal(structured, f"it has {len(structured.choices)} choices; at most {MAX_CHOICES}")


def _source(structured: Structured) -> str:
    """The form in the library's own notation, and what may stand before it."""
    form = _form(structured)
    if not structured.before:
        return form
    parts = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    first = {"lark_grammar": f"start: before @form\n{structured.before}\n"}
    return json.dumps({"grammars": [first, {**parts[0], "name": "form"}]})


def _form(structured: Structured) -> str:
    text = structured.text
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if structured.kind == "grammar":
        return LLMatcher.grammar_from_lark(text)
    if structured.kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choices)
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    schema = {"type": "object"} if structured.kind == "json_object" else json.loads(text)
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    if not isinstance(schema, dict):
        raise refusal(structured, "a schema is an object, true or false")
    return LLMatcher.grammar_from_json_schema({**schema, "x-guidance": JSON_OPTIONS})


def refusal(structured: Structured, reason: str) -> InvalidRequestError:
    """What to tell whoever asked for it."""
    kinds = {"json_schema": "JSON schema", "json_object": "form", "regex": "regular expression"}
    lines = reason.splitlines() or ["the library does not say why"]  # after the first comes a drawing of the place
    told = " ".join([lines[0].strip(), *(line for line in lines[1:] if line.startswith("error:"))])
    told = told.replace("Unimplemented keys:", "these keywords are not supported:")[:MAX_REASON]
    kind = kinds.get(structured.kind, structured.kind)
    return InvalidRequestError(f"the {kind} cannot be obeyed: {told}", "structured")
