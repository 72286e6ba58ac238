import pytest

from penstock.api.sampling_params import Structured
from penstock.errors import InvalidRequestError
from penstock.structured.worker import validate

LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
WIDE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer"} for i in range(2000)},
    "additionalProperties": False,
}


def test_grammars_that_can_be_followed_pass(vocabulary):
    for grammar in (
        Structured.json_object(),
        Structured.regex(".*a.{200}"),
        Structured.grammar('start: "x" start | "y"'),
    ):
        validate(vocabulary, grammar)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [(Structured.json_schema(LOOP), "no answer could satisfy it"), (Structured.json_schema(WIDE), "too complex")],
)
def test_a_grammar_that_fails_only_when_it_is_followed_is_refused_too(vocabulary, grammar, words):
    with pytest.raises(InvalidRequestError, match=words):
        validate(vocabulary, grammar)
