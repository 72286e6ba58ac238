"""Random schemas of the supported features: each finished answer is valid, number by number, with no key twice.

`TEST_SWEEP=2000` for as many schemas; the default keeps the suite short.
"""

import json
import os
from decimal import Decimal
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from penstock.api.sampling_params import Structured
from penstock.errors import InvalidRequestError
from penstock.structured.grammar import compile_grammar
from tests.structured.answers import finished

EXAMPLES = int(os.environ.get("TEST_SWEEP", "60"))

numbers = st.one_of(
    st.integers(-20, 20),
    st.integers(-(2**63), 2**63 - 1),
    st.decimals(-1000, 1000, places=3).map(float),
    st.floats(-1e9, 1e9, allow_subnormal=False),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text('ab"\\\nüé/', max_size=3))
names = st.sampled_from(["a", "b", "ü", 'q"', "x y"])
formats = st.sampled_from(
    ["date", "time", "date-time", "hostname", "email", "ipv4", "ipv6", "uuid", "int32", "password", "nanoid"]
)
patterns = st.sampled_from(
    ["^[ab]{1,3}$", "b", "^\\d{2}-\\w$", "^[^a]*?x$", "^(a|bc){1,2}$", "^.\\s.$", "^(?=.*b)[ab1]{2,3}$"]
)


@st.composite
def integers(draw):
    low, high = sorted([draw(st.integers(-(2**63), 2**63)), draw(st.integers(-(2**63), 2**63))])
    return {"type": "integer", "minimum": low, "maximum": high}


@st.composite
def fractions(draw):
    low, high = sorted([draw(numbers), draw(numbers)])
    return {"type": "number", draw(st.sampled_from(["minimum", "exclusiveMinimum"])): low, "maximum": high}


leaves = st.one_of(
    st.fixed_dictionaries({"const": scalars}),
    st.fixed_dictionaries({"enum": st.lists(scalars, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"type": st.just("string"), "format": formats}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": patterns}),
    st.fixed_dictionaries({"type": st.just("string"), "minLength": st.integers(0, 2), "maxLength": st.integers(2, 4)}),
    st.fixed_dictionaries(
        {"type": st.just("integer"), "minimum": st.just(0), "maximum": st.just(99), "multipleOf": st.integers(1, 9)}
    ),
    st.just({"type": ["boolean", "null"]}),
    st.just({"not": {}}),
    integers(),
    fractions(),
)
few = st.one_of(
    st.fixed_dictionaries({"enum": st.lists(scalars, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(1, 3)}),
    st.just({"type": "integer", "minimum": 1, "maximum": 12}),
    st.just({"type": ["boolean", "null"]}),
)


def containers(inner):
    return st.one_of(
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, min_size=1, max_size=3),
            st.sets(names),
        ),
        st.builds(
            lambda value, least: {
                "type": "object",
                "additionalProperties": value,
                "minProperties": least,
                "maxProperties": 4,
            },
            inner,
            st.integers(0, 3),
        ),
        st.builds(
            lambda value, rule: {
                "type": "object",
                "additionalProperties": value,
                "propertyNames": rule,
                "maxProperties": 3,
            },
            inner,
            st.sampled_from([{"pattern": "^[a-c]{1,2}$"}, {"maxLength": 2}, {"minLength": 1, "maxLength": 3}]),
        ),
        st.builds(
            lambda value, least: {"type": "array", "items": value, "minItems": least, "maxItems": 3},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda value: {"type": "array", "items": value, "uniqueItems": True, "maxItems": 4}, few),
        st.builds(lambda first, second: {"anyOf": [first, second]}, inner, inner),
        st.builds(lambda first, second: {"oneOf": [first, second]}, inner, inner),
    )


schemas = st.recursive(leaves, containers, max_leaves=5)


def no_key_twice(pairs):
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


@settings(max_examples=EXAMPLES)
@given(schemas, st.integers(0, 2**32))
def test_each_finished_answer_is_valid(vocabulary, tokenizer, schema, seed):
    try:
        grammar = compile_grammar(vocabulary, Structured.json_schema(schema))
    except InvalidRequestError:
        return
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for number in range(3):
        answer = finished(grammar, vocabulary, Random(seed + number))
        if answer is not None:
            text = tokenizer.decode(list(answer))
            document = json.loads(text, parse_float=Decimal, object_pairs_hook=no_key_twice)
            validator.validate(document)
