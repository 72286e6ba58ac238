"""Expressions with look-ahead and what replaces them match the same texts, as Python's `re` reads both."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.structured.json_schema.document import SchemaError
from penstock.structured.json_schema.look_ahead import KNOWN, conjuncts
from penstock.structured.json_schema.patterns import translate

EMAIL, EMAIL_OF_ZOD_TO_JSON_SCHEMA, DURATION, IBAN = KNOWN
ALPHABETS = {EMAIL: "a.-@+'", EMAIL_OF_ZOD_TO_JSON_SCHEMA: "a.-@+'", DURATION: "P1WYDTMS.", IBAN: "A0129a"}
LENGTHS = {EMAIL: 6, EMAIL_OF_ZOD_TO_JSON_SCHEMA: 6, DURATION: 5, IBAN: 4}
ENDINGS = {EMAIL: ".aa", EMAIL_OF_ZOD_TO_JSON_SCHEMA: ".aa", IBAN: "00000000000"}
"""What makes a long text of a short one."""
PIECES = {
    EMAIL: ["a", "Z", "9", ".", "..", "-", "_", "'", "+", "@", "@a.", ".com", " ", "é"],
    EMAIL_OF_ZOD_TO_JSON_SCHEMA: ["a", "Z", "9", ".", "..", "-", "_", "'", "+", "@", "@a.", ".com", " ", "é"],
    DURATION: ["P", "T", "1Y", "2M", "3W", "4D", "5H", "6M", "7S", "1.5S", "1,5S", "W", "1", "."],
    IBAN: ["AB", "00", "01", "02", "19", "98", "99", "ZZ", "A" * 11, "0" * 15, "a"],
}


def matches(patterns, text):
    return all(re.search(pattern.removesuffix("$") + r"\Z", text, re.ASCII) is not None for pattern in patterns)


known = pytest.mark.parametrize("pattern", KNOWN, ids=["email", "email of zod-to-json-schema", "duration", "IBAN"])


@known
def test_expressions_of_libraries_are_equal_on_all_short_texts(pattern):
    short = (
        "".join(letters) + ENDINGS.get(pattern, "")
        for length in range(LENGTHS[pattern] + 1)
        for letters in itertools.product(ALPHABETS[pattern], repeat=length)
    )
    found = 0
    for text in short:
        found += matches([pattern], text)
        assert matches([pattern], text) == matches(conjuncts(pattern), text), text
    assert found > 10


@known
@given(st.data())
def test_expressions_of_libraries_are_equal_on_longer_texts(pattern, data):
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[pattern]), max_size=9)))
    assert matches([pattern], text) == matches(conjuncts(pattern), text)
    assert translate(pattern, "")


atoms = st.sampled_from(["a", "b", r"\d", "[ab1]", "[^)]", r"\)", "[(|]", ".", r"\D", "(?:a|b)", "(1|[b|])"])
pieces = st.builds(
    "".join, st.lists(st.builds(str.__add__, atoms, st.sampled_from(["", "*", "+?", "{2}"])), max_size=4)
)
ahead = st.builds(
    lambda one, end, other: f"{one}{end}{other}", pieces, st.sampled_from(["", "$"]), st.sampled_from(["", "|a"])
)


@given(
    st.lists(ahead, max_size=3),
    pieces,
    st.sampled_from(["", "$", "|b", "a(?=b)b", "a(?!b)"]),
    st.text("ab1()|", max_size=6),
)
def test_look_ahead_at_the_beginning_is_split_into_expressions_that_all_match(texts, rest, end, text):
    pattern = "^" + "".join(f"(?={text})" for text in texts) + rest + end
    split = conjuncts(pattern)
    assert (re.search(pattern, text) is not None) == all(re.search(one, text) for one in split)
    assert len(split) == (1 if end == "|b" else len(texts) + 1)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)b", "a(?=b)", "^(?!a)b", "^(?<=a)b", "^(?=a)*b", "^(?=a", "^(?=a)b|c", "^(?=a)(?!b)c", "^(?=(?=a)b)c"),
        *("^(?:(?=a))b", "^a(?!$)", "^(?=a)b)|(c"),
    ],
)
def test_other_look_around_stays_and_is_refused(pattern):
    with pytest.raises(SchemaError):
        translate(pattern, "")
