import threading
from array import array
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest

from penstock.api.sampling_params import Structured
from penstock.core.plan import Ending, SampleBatch, SampledSequence
from penstock.errors import InvalidRequestError
from penstock.structured.masks import KEPT_GRAMMARS, Grammars
from tests.support.params import GREEDY

PROMPT = [5, 6, 7]


@pytest.fixture
def grammars(vocabulary):
    made = Grammars(lambda: vocabulary, vocabulary.size, max_num_seqs=4)
    yield made
    made.close()


def batch(*rows, stops=(2,)):
    """Rows as (sequence, form, tokens before the new one), and what else its history holds."""
    samples = SampleBatch()
    for sequence, form, answer, *beyond in rows:
        params = replace(GREEDY, structured=form, stop_token_ids=stops)
        tokens = array("i", [*PROMPT, *answer, *(beyond[0] if beyond else [])])
        samples.sequences.append(SampledSequence(len(samples), sequence, params, len(PROMPT), tokens))
        samples.positions.append(len(PROMPT) + len(answer))
        samples.indices.append(0)
    return samples


def tokens_of(masks):
    """The tokens that each masked row allows."""
    bits = np.unpackbits(np.ascontiguousarray(masks.result()).view(np.uint8), axis=1, bitorder="little")
    return {row: set(line.nonzero()[0].tolist()) for row, line in zip(masks.rows, bits, strict=True)}


def test_rows_without_a_form_have_no_mask(grammars, tokenizer, vocabulary):
    assert not batch((1, None, [])).has_grammars
    masks = grammars.begin(batch((1, None, []), (2, Structured.regex("x"), []), (3, None, [])))
    assert masks.rows == [1]
    assert masks.result().shape == (1, (vocabulary.size + 31) // 32)
    assert masks.result().dtype == np.int32
    assert tokens_of(masks) == {1: set(tokenizer.encode("x", add_special_tokens=False))}


def test_stop_tokens_are_allowed_where_the_answer_may_end_and_nowhere_else(grammars, tokenizer):
    (x,) = tokenizer.encode("x", add_special_tokens=False)
    form = Structured.regex("x+")
    masks = grammars.begin(batch((1, form, []), (2, form, [x]), stops=(2, 1)))
    assert tokens_of(masks)[0] & {1, 2} == set()
    assert tokens_of(masks)[1] & {1, 2} == {1, 2}
    text_stop = grammars.begin(batch((3, form, []), (4, form, [x]), stops=(x,)))
    assert x in tokens_of(text_stop)[1]
    assert text_stop.endings() == {0: Ending.GRAMMAR_FAILED} or x not in tokens_of(text_stop)[0]


def test_a_sequence_that_can_only_end_is_complete_with_and_without_stop_tokens(grammars, tokenizer):
    answer = tokenizer.encode("yes", add_special_tokens=False)
    for sequence, stops in ((1, (2,)), (2, ())):
        masks = grammars.begin(batch((sequence, Structured.choice(["yes", "no"]), answer), stops=stops))
        assert masks.endings() == {0: Ending.GRAMMAR_COMPLETE}


def test_rows_of_drafts_get_the_mask_of_their_own_place(grammars, tokenizer):
    form = Structured.choice(["yes, please", "no"])
    tokens = tokenizer.encode("yes, please", add_special_tokens=False)
    drafted = grammars.begin(batch(*((1, form, tokens[:i], tokens[i:]) for i in range(len(tokens) + 1))))
    alone = [grammars.begin(batch((10 + i, form, tokens[:i]))) for i in range(len(tokens) + 1)]
    for i, one in enumerate(alone):
        assert tokens_of(drafted)[i] == tokens_of(one)[0]
    assert drafted.endings() == {len(tokens): Ending.GRAMMAR_COMPLETE}


def test_a_draft_that_is_forbidden_spoils_neither_its_step_nor_the_next(grammars, tokenizer):
    form = Structured.choice(["yes, please", "no"])
    tokens, wrong = (tokenizer.encode(text, add_special_tokens=False) for text in ("yes, please", "zebra"))
    masks = grammars.begin(batch((1, form, []), (1, form, wrong[:1]), (1, form, wrong[:2])))
    first = tokens_of(masks)[0]
    assert masks.endings() == {}
    after = grammars.begin(batch((1, form, tokens[:1])))
    assert tokens_of(after) == tokens_of(grammars.begin(batch((2, form, tokens[:1]))))
    assert tokens_of(grammars.begin(batch((1, form, []))))[0] == first


def test_a_sequence_whose_state_is_gone_gets_it_again_from_its_tokens(grammars, tokenizer):
    form = Structured.json_object()
    tokens = tokenizer.encode('{"a": [1, {"b', add_special_tokens=False)
    before = tokens_of(grammars.begin(batch((1, form, tokens))))
    for other in range(2, 40):  # more than are kept
        grammars.begin(batch((other, form, [])))
    assert tokens_of(grammars.begin(batch((1, form, tokens)))) == before


def test_an_answer_that_left_its_grammar_fails_alone(grammars, tokenizer):
    wrong = tokenizer.encode("zebra", add_special_tokens=False)
    masks = grammars.begin(batch((1, Structured.choice(["yes"]), wrong), (2, Structured.choice(["yes"]), [])))
    assert masks.endings() == {0: Ending.GRAMMAR_FAILED}
    assert tokens_of(masks)[0] == set()
    assert tokens_of(masks)[1]


def test_a_grammar_that_becomes_too_complex_fails_alone(grammars, tokenizer):
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    bomb = Structured.regex("(a{1,1000}){1,1000}")
    answer = []
    while True:
        masks = grammars.begin(batch((1, bomb, answer), (2, Structured.regex("a*"), answer)))
        assert a in tokens_of(masks)[1]
        if masks.endings():
            break
        answer.append(a)
        assert len(answer) < 400
    assert masks.endings() == {0: Ending.GRAMMAR_FAILED}


def test_a_grammar_is_compiled_once(grammars):
    future = grammars.compile(Structured.json_object())
    assert grammars.compile(Structured.json_object()) is future
    for number in range(KEPT_GRAMMARS + 1):
        grammars.compile(Structured.choice([str(number)]))
    assert grammars.compile(Structured.json_object()) is not future


def test_a_form_that_cannot_be_compiled_fails_its_future_and_its_row(grammars):
    bad = Structured.regex("(a")
    with pytest.raises(InvalidRequestError):
        grammars.compile(bad).result()
    masks = grammars.begin(batch((1, bad, []), (2, Structured.regex("a"), [])))
    assert masks.endings() == {0: Ending.GRAMMAR_FAILED}


def test_tenants_take_turns_at_the_compiler_and_dropped_grammars_are_left_out(vocabulary):
    begin, compiled = threading.Event(), []

    def load():
        assert begin.wait(20)
        return vocabulary

    grammars = Grammars(load, vocabulary.size, max_num_seqs=4)
    try:
        futures = {}
        for name in ("a0", "a1", "a2", "a3", "b0"):
            futures[name] = grammars.compile(Structured.regex(name), name[0])
            futures[name].add_done_callback(lambda _, name=name: compiled.append(name))
        grammars.drop(futures["a1"])
        assert futures["a1"].cancelled()
        begin.set()
        again = grammars.compile(Structured.regex("a1"), "a")
        wait([again, *futures.values()], 20)
        assert [name for name in compiled if name != "a1"] == ["a0", "a2", "b0", "a3"]
        assert again.result() is not None
    finally:
        begin.set()
        grammars.close()
