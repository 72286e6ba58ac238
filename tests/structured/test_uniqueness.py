"""Keys and items that must not come twice, told at each token."""

import json
from random import Random

import pytest

from penstock.api.sampling_params import JsonRegions, Structured
from penstock.structured.grammar import compile_grammar
from penstock.structured.scanner import Mode, Scanner
from tests.structured.answers import accepts, random_answer
from tests.structured.test_sweep import no_key_twice

THREE = {"type": "object", "minProperties": 3, "maxProperties": 3, "additionalProperties": {"type": "boolean"}}


def read(documents, text, token=b""):
    scanner = Scanner(documents, {})
    state = scanner.start()
    for byte in text:
        assert state is not None
        state = scanner.follow(state, 7, bytes([byte]))
    return state


@pytest.mark.parametrize("seed", range(20))
def test_random_answers_have_no_key_twice(vocabulary, tokenizer, seed):
    short = {**THREE, "propertyNames": {"pattern": "^[ab]{1,2}$"}}
    grammar = compile_grammar(vocabulary, Structured.json_schema(short))
    text = tokenizer.decode(list(random_answer(grammar, vocabulary, Random(seed))))
    assert len(json.loads(text, object_pairs_hook=no_key_twice)) == 3


@pytest.mark.parametrize("values", [["a", "ab", "b"], [1, 10, 11, 2.5], [True, False, None]])
@pytest.mark.parametrize("seed", range(5))
def test_a_list_may_use_up_all_of_a_few_values(vocabulary, tokenizer, values, seed):
    schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": len(values)}
    grammar = compile_grammar(vocabulary, Structured.json_schema(schema))
    written = json.loads(tokenizer.decode(list(random_answer(grammar, vocabulary, Random(seed)))))
    assert sorted(written, key=str) == sorted(values, key=str)


def test_equal_keys_of_different_objects_are_fine(vocabulary, tokenizer):
    form = Structured.json_object()
    assert accepts(vocabulary, tokenizer, form, '{"a": {"a": 1, "b": [{"a": 1}, {"a": 2}]}, "b": "a\\": 1, \\"a"}')
    assert not accepts(vocabulary, tokenizer, form, '{"b": {"a": 1}, "c": [{"a": 1, "a": 2}]}')
    assert not accepts(vocabulary, tokenizer, form, '{"a": {"b": 1}, "a": 1}')


def test_documents_begin_after_reasoning_and_marks():
    thinking = JsonRegions(thinking=('"<think>"', '"</think>"'))
    assert read(thinking, b'<think>{"a": 1, "a": 2}</think>\n{"a": 1').mode is Mode.SCALAR
    assert read(thinking, b'{"a": 1, "a"') is None
    assert read(thinking, b'<think>{"a": 1, "a": 2}</think>{"a": 1, "a"') is None
    called = JsonRegions(after=('"<call>"',))
    assert read(called, b'{"a": 1, "a": 2} <call>{"a": 1} {"a": 1, "a": 2}').mode is Mode.TEXT
    assert read(called, b'so <call>{"a": 1, "a"') is None
    by_token = Scanner(JsonRegions(after=("<[7]>",)), {})
    assert by_token.follow(by_token.start(), 7, b"") is not None
    assert by_token.follow(by_token.start(), 7, b"").mode is Mode.DOCUMENT


def follow(documents, *tokens):
    """The state after special tokens, which are numbers, and texts, byte by byte."""
    scanner = Scanner(documents, {})
    state = scanner.start()
    for token in tokens:
        pieces = [b""] if isinstance(token, int) else [bytes([byte]) for byte in token]
        for piece in pieces:
            assert state is not None
            state = scanner.follow(state, token if isinstance(token, int) else 0, piece)
    return state


def test_a_mark_may_be_texts_and_special_tokens_in_a_row():
    documents = JsonRegions(after=('<[1]> "final" <[2]>', '"json" <[2]>'))
    assert follow(documents, 1, b"final", 2, b'{"a": 1, "a"') is None
    assert follow(documents, 1, b"commentary to=f ", 3, b"json", 2, b'{"a": 1, "a"') is None
    other = follow(documents, 1, b"analysis", 2, b'{"a": 1, "a": 2', 4, 5, b"assistant", 1, b"final", 2)
    assert other.mode is Mode.DOCUMENT
    assert follow(documents, 1, b"final", b"<[2]>", b'{"a": 1, "a": 2}').mode is Mode.TEXT, "it is no special token"


def test_a_document_follows_a_mark_at_once_where_reasoning_may_come_first():
    documents = JsonRegions(after=("<[1]>",), thinking=("<[2]>", "<[3]>"))
    assert follow(documents, 1, b'{"a": 1, "a"') is None
    assert follow(documents, 2, b'{"a": 1, "a": 1}', 3, 1, b'{"a": 1, "a"') is None


def test_a_mark_of_any_length_is_recognised():
    long = "x" * 200
    assert follow(JsonRegions(after=(json.dumps(long),)), long.encode() + b'{"a": 1, "a"') is None
