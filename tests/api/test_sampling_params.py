import math

import pydantic
import pytest

from penstock.api.sampling_params import SamplingParams, Structured
from penstock.api.transcript_rules import TranscriptRules
from penstock.errors import InvalidRequestError

RANGES = {
    "n": ([1, 128], [0, 129, -1, 1.5, "2", None, True]),
    "temperature": ([0, 0.0, 1, 100.0, None], [-0.1, 101, math.nan, math.inf, 10**400, "1", True]),
    "top_k": ([0, 50, 2**31 - 1, None], [-1, 2**31, 2.0, "5", False]),
    "top_p": ([1e-6, 0.5, 1, 1.0, None], [0, 0.0, 1.1, -1, math.nan, "0.5", True]),
    "min_p": ([0, 0.1, 1, None], [-0.1, 1.1, math.nan, "0"]),
    "typical_p": ([1e-6, 0.5, 1, None], [0, 1.1, math.nan, "0.5"]),
    "repetition_penalty": ([0.01, 1, 1.3, 100, None], [0, 0.001, -1, 101, math.inf, "1"]),
    "frequency_penalty": ([-2, 0, 0.5, 2.0], [-2.1, 2.1, math.nan, None, "0", True]),
    "presence_penalty": ([-2, 0, 0.5, 2.0], [-2.1, 2.1, math.nan, None, "0", True]),
    "share_penalty": ([-2, 0, 0.5, 2.0], [-2.1, 2.1, math.nan, None, "0", True]),
    "logit_bias": (
        [{}, {0: 1, 7: -100.0, 2**31 - 1: 100}],
        [None, [], {-1: 1}, {"5": 1}, {True: 1}, {1: None}, {1: 101}, {1: math.nan}, dict.fromkeys(range(16_385), 1)],
    ),
    "bad_words": ([[], ["a", "b c"], ("x",)], [None, "word", [""], [" "], [1], ["x"] * 257, ["x" * 8193], ["\udc00"]]),
    "bad_token_ids": ([[], [0, 7], tuple(range(16_384))], [None, 5, [-1], [True], [1.0], [0] * 16_385]),
    "allowed_token_ids": ([None, [0], (7, 7)], [[], 5, [-1], [None], "12", [0] * 16_385]),
    "seed": ([0, 2**64 - 1, None], [-1, 2**64, 1.0, "1", True]),
    "max_tokens": ([0, 1, 2**31 - 1, None], [-1, 2**31, 1.0, "7", True]),
    "min_tokens": ([0, 5], [-1, None, 1.0, True]),
    "stop": (
        ["END", ["a", "b"], [], ("x",), ["x" * 256] * 16, "x" * 4096],
        ["", ["a", ""], [1], ["x"] * 17, "x" * 4097, ["x" * 257] * 16, None, 5, {"a": 1}, ["a\ud800"]],
    ),
    "stop_token_ids": ([[], [0, 7], (3,)], [[-1], ["a"], [None], [True], [1.0], None, 5, "12", {1: 2}, [0] * 16_385]),
    "shown_special_tokens": ([[], [0, 7]], [[-1], [None], None, 5, [0] * 16_385]),
    "ignore_eos": ([True, False], [None, 1, "yes"]),
    "logprobs": ([None, 0, 20], [-1, 21, 1.0, True, "5"]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21, 1.0, True, "5"]),
    "best_of": ([None, 1, 128], [0, 129, 1.0, True, "5"]),
    "num_beams": ([1, 2, 128], [0, 129, 2.0, True, None, "5"]),
    "length_penalty": ([-1, 0.0, 1, 2.5], [-11, 11, math.nan, math.inf, None, True, "1"]),
    "early_stopping": ([True, False, "never"], ["always", None, 2]),
    "structured": ([None, Structured.json_object(), Structured.choice(["yes", "no"])], ["json", {"type": "object"}]),
    "transcript": ([None, TranscriptRules(first_timestamp=7, end=5)], ["rules", {"first_timestamp": 7}]),
}
BESIDE = {"length_penalty": {"num_beams": 2}, "early_stopping": {"num_beams": 2}}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (good, _) in RANGES.items() for v in good])
def test_a_value_in_range_is_taken(name, value):
    SamplingParams(**{name: value}, **BESIDE.get(name, {}))


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (_, bad) in RANGES.items() for v in bad])
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value}, **BESIDE.get(name, {}))
    assert caught.value.param == name
    assert name in str(caught.value)


def test_every_field_is_tested_here():
    assert set(RANGES) == set(SamplingParams.__slots__)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop_token_ids == (1,)


def test_min_tokens_above_max_tokens_are_refused():
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"num_beams": 2, "n": 3}, "n"),
        ({"num_beams": 2, "temperature": 0.5}, "temperature"),
        ({"num_beams": 2, "top_p": 0.5}, "top_p"),
        ({"num_beams": 2, "best_of": 2}, "best_of"),
        ({"num_beams": 2, "stop": "END"}, "stop"),
        ({"num_beams": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"num_beams": 2, "structured": Structured.json_object()}, "structured"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields, at_fault):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == at_fault


@pytest.mark.parametrize(("fields", "at_fault"), [({"num_beams": 2}, "num_beams"), ({"best_of": 3, "n": 2}, "best_of")])
def test_what_is_known_only_at_the_end_cannot_be_streamed(fields, at_fault):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields).check_streamable()
    assert caught.value.param == at_fault
    SamplingParams(best_of=2, n=2).check_streamable()


@pytest.mark.parametrize(
    ("kind", "text", "choices"),
    [("xml", "", ()), ("regex", "", ()), ("json_schema", None, ()), ("choice", "", ()), ("choice", "", ("a", "")),
     ("choice", "", "ab")],
)  # fmt: skip
def test_a_form_that_says_nothing_is_refused(kind, text, choices):
    with pytest.raises(InvalidRequestError) as caught:
        Structured(kind, text, choices)
    assert caught.value.param == "structured"


def test_a_schema_is_kept_as_json_text_in_its_order():
    schema = {"b": {"type": "string"}, "a": "ü"}
    assert Structured.json_schema(schema).text == '{"b": {"type": "string"}, "a": "ü"}'
    with pytest.raises(InvalidRequestError, match="cannot be JSON"):
        Structured.json_schema({"a": object()})


def test_a_pydantic_class_is_its_schema() -> None:
    class Person(pydantic.BaseModel):
        name: str

    assert Structured.json_schema(Person) == Structured.json_schema(Person.model_json_schema())
    with pytest.raises(InvalidRequestError, match="the schema cannot be JSON"):
        Structured.json_schema(int)
