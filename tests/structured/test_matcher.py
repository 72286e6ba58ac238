from array import array
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.sampling_params import Structured
from penstock.structured.grammar import compile_grammar
from penstock.structured.matcher import Matcher, set_tokens
from tests.structured.answers import mask, random_answer
from tests.support.schemas import check_document, random_schema


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_a_random_walk_ends_in_a_document_of_the_schema(vocabulary, tokenizer, seed):
    schema = random_schema(seed)
    start = compile_grammar(vocabulary, Structured.json_schema(schema))
    answer = random_answer(start, vocabulary, Random(seed))
    if len(answer) < 300:
        check_document(tokenizer.decode(list(answer)), schema)


@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_whatever_was_followed_before_the_mask_is_that_of_the_tokens(vocabulary, seed):
    dice = Random(seed)
    start = compile_grammar(vocabulary, Structured.json_schema(random_schema(seed)))
    answers = [random_answer(start, vocabulary, dice, 60) for _ in range(3)]
    matcher = Matcher(start)
    for _ in range(15):
        answer = dice.choice(answers)
        answer = answer[: dice.randint(0, len(answer))]
        guess = answer + array("i", [dice.randrange(vocabulary.size) for _ in range(2)])
        new = Matcher(start)
        assert matcher.follow(guess) == new.follow(guess)
        assert matcher.follow(answer)
        fresh = Matcher(start)
        assert fresh.follow(answer)
        assert mask(matcher, vocabulary) == mask(fresh, vocabulary)


def test_what_is_forced_is_the_text_as_a_tokenizer_writes_it(vocabulary, tokenizer):
    properties = {"name": {"const": "hello"}, "n": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "n"], "additionalProperties": False}
    matcher = Matcher(compile_grammar(vocabulary, Structured.json_schema(schema)))
    text = '{"name": "hello", "n": '
    assert text.startswith(tokenizer.decode(matcher.forced()))
    assert '"hello"' in tokenizer.decode(matcher.forced())
    assert matcher.follow(array("i", tokenizer.encode(text + "1", add_special_tokens=False)))
    assert matcher.forced() == []


@pytest.mark.parametrize("token", [0, 31, 32, 63])
def test_bits_of_tokens_are_set_and_cleared(token):
    row = np.zeros(2, dtype=np.uint32)
    set_tokens(row, (token,), True)
    assert row[token // 32] == 1 << token % 32
    set_tokens(row, (token,), False)
    assert not row.any()
