"""Answers of gpt-oss that a grammar permits: messages, the last of which may be a call."""

import pytest

from penstock.api.sampling_params import Structured
from penstock.api.tools import Function, Tools
from penstock.parsers.conversation import HARMONY, ChatFormat
from penstock.parsers.parts import Reasoning, Text, ToolCall, put_together
from penstock.parsers.reasoning import KINDS
from tests.parsers.answers import enforced, permits, random_parameters, random_text
from tests.support.schemas import check_document

ANALYSIS = KINDS[3]
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
COUNT, FIND = Function("count", None, NUMBER, strict=True), Function("find", None, {"type": "object"})
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm {{a: }}.{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>I count.{NEXT}"
FINAL = "<|channel|>final<|message|>"
HEADERS = [
    "<|channel|>commentary to=functions.count <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.count json<|message|>",
    " to=functions.count<|channel|>commentary json<|message|>",
    " to=functions.count<|channel|>commentary <|constrain|>json<|message|>",
]
CALL = HEADERS[0] + '{"n": 5}'


def grammar(form=None, functions=(COUNT, FIND), **said):
    return enforced(HARMONY, Tools(functions, **said), form, ANALYSIS)


def read(text, *functions):
    parser = ChatFormat(HARMONY, ANALYSIS, frozenset()).parser(functions, "")
    return put_together([*parser.feed_text(text), *parser.finish()])


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("said", [{}, {"choice": "required"}, {"parallel": False}])
def test_a_call_has_either_header_and_validates(header, said):
    form = grammar(**said)
    assert permits(form, header + '{"n": 5}')
    assert read(header + '{"n": 5}', COUNT) == [ToolCall("count", '{"n": 5}')]
    for arguments in ('{"n": "5"}', "{}", '{"n": 5, "n": 6}', '{"n": 5, "m": 6}', "5"):
        assert permits(form, header + arguments) is False
    assert permits(form, (header + '{"n": 5}').replace("count", "other")) is False


def test_a_required_call_follows_reasoning_alone():
    form = grammar(choice="required")
    for before in ("", THOUGHT, THOUGHT * 2):
        assert permits(form, before + CALL)
        for begun in (before, before + CALL[:-1]):
            assert permits(form, begun) is None, "it may not end here"
    for before in (PREAMBLE, FINAL, f"{FINAL}Yes{NEXT}", "Yes "):
        assert permits(form, before + CALL) is False
    named = enforced(HARMONY, Tools.forced((COUNT, FIND), "count"), None, ANALYSIS)
    assert permits(named, THOUGHT + CALL)
    assert permits(named, CALL.replace("count", "find")) is False


def test_an_answer_ends_with_its_call():
    for said in ({}, {"choice": "required"}):
        form = grammar(**said)
        for after in (" ", "<|call|>", f"<|call|><|start|>assistant{CALL}", f"{NEXT}{FINAL}"):
            assert permits(form, CALL + after) is False


def test_where_calls_are_optional_all_messages_are_permitted():
    form = grammar()
    for before in ("", THOUGHT, PREAMBLE, THOUGHT + PREAMBLE + THOUGHT, f"{FINAL}Well{NEXT}"):
        for last in (f"{FINAL}Yes {{}} <|b", f'{FINAL}{{"a": 1, "a": 2}}', FINAL, CALL, PREAMBLE.removesuffix(NEXT)):
            assert permits(form, before + last), before + last
    find = "<|channel|>commentary to=functions.find json<|message|>"
    assert permits(form, find + '{"any": [1, null]}'), "this one is not strict"
    assert permits(form, find + "[]") is False
    assert read(THOUGHT + PREAMBLE + CALL, COUNT) == [
        Reasoning("Hm {a: }."),
        Text("I count."),
        ToolCall("count", '{"n": 5}'),
    ]


def test_beside_a_form_an_answer_is_a_call_or_a_final_message_of_the_form():
    for said in ({}, {"parallel": False}):
        form = grammar(Structured.json_object(), **said)
        for before in ("", THOUGHT, THOUGHT * 2):
            for answer in (CALL, f'{FINAL}{{"a": [{{"a": 1}}]}}'):
                assert permits(form, before + answer)
            for answer in (f"{FINAL}Yes", f"{FINAL}[]", f'{FINAL}{{"a": 1, "a": 2}}', PREAMBLE + CALL, "{}"):
                assert permits(form, before + answer) is False
    words = grammar(Structured.choice(["yes", "no"]))
    assert permits(words, THOUGHT + FINAL + "yes")
    assert permits(words, THOUGHT + CALL)


def test_reasoning_that_looks_like_json_is_no_document():
    repeated = THOUGHT.replace("Hm {a: }.", '{"a": 1, "a": [{"b')
    for form in (grammar(), grammar(choice="required"), grammar(Structured.json_object())):
        assert permits(form, repeated + CALL)
        assert permits(form, repeated + HEADERS[0] + '{"n": 5, "n": 5}') is False
    alone = grammar(Structured.json_object(), functions=())
    assert permits(alone, repeated + FINAL + '{"a": 1}')
    assert permits(alone, repeated + FINAL + '{"a": 1, "a": 1}') is False


@pytest.mark.parametrize("said", [{}, {"choice": "required"}, {"parallel": False}])
def test_random_answers_are_read_back_and_their_calls_validate(said):
    for seed in range(12):
        functions = Function("f", None, random_parameters(seed), strict=True), Function("g", strict=True)
        text = random_text(grammar(functions=functions, **said), seed)
        parts = [] if text is None else read(text, *functions)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        for call in calls:
            check_document(call.arguments, {function.name: function for function in functions}[call.name].schema)
        assert len(calls) <= 1
        if text is not None and said == {"choice": "required"}:
            assert len(calls) == 1
            assert not any(isinstance(part, Text) for part in parts)
