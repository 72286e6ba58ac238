"""The ids of a stream's events: what was told is not told again, and nothing is left out."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.request import FinishReason
from penstock.errors import InvalidRequestError
from penstock.frontend.output_processor import CompletionDelta
from penstock.frontend.recovery.stream_cursor import Origin, StreamCursor

SIZES = [2, 1]


def tell(cursor, deltas):
    """Events as a dialect would make them: one a delta, two for its first, none for an empty text."""
    events = b""
    for position, delta in deltas:
        text = "".join(f"data: {position} {delta.index} {token}\n\n" for token in delta.token_ids if token % 3)
        if delta.finish_reason:
            text += f"data: {position} {delta.index} end\n\n"
        events += cursor.mark(position, delta, text.encode())
    return events


@st.composite
def streams(draw):
    """One token a delta, three answers, in any order."""
    left = {key: list(range(1, 1 + draw(st.integers(0, 6)))) for key in ((0, 0), (0, 1), (1, 0))}
    deltas = []
    while left:
        key = draw(st.sampled_from(sorted(left)))
        ended = not left[key]
        tokens = [] if ended else [left[key].pop(0)]
        reason = FinishReason.LENGTH if ended else None
        deltas.append((key[0], CompletionDelta(key[1], "", tokens, finish_reason=reason)))
        if ended:
            del left[key]
    return deltas


@settings(max_examples=200, deadline=None)
@given(first=streams(), data=st.data())
def test_a_stream_broken_off_anywhere_and_told_again_in_any_order_is_heard_once(first, data):
    heard = tell(StreamCursor("call", SIZES), first)
    cuts = [0, *(found.end() for found in re.finditer(rb"\n\n", heard))]
    begin = heard[: data.draw(st.sampled_from(cuts))]
    ids = re.findall(rb"id: (.*)\n", begin)
    cursor = StreamCursor.parse(ids[-1].decode(), SIZES) if ids else StreamCursor("call", SIZES)
    begin = begin[: begin.rfind(b"id: ")] + begin[begin.rfind(b"id: ") :].split(b"\n\n")[0] + b"\n\n" if ids else b""
    keys = {(position, delta.index) for position, delta in first}
    again = [
        pair for key in data.draw(st.permutations(sorted(keys))) for pair in first if key == (pair[0], pair[1].index)
    ]
    both = begin + tell(cursor, again)
    for position, index in keys:
        pattern = rf"data: {position} {index} (\w+)".encode()
        assert re.findall(pattern, both) == re.findall(pattern, heard)


def test_an_id_may_tell_what_the_answers_are_computed_from():
    origin = Origin((7, 2**64 - 1), ("ab12", ""))
    cursor = StreamCursor("call", SIZES, origin=lambda: origin)
    told = cursor.mark(1, CompletionDelta(0, "", [5]), b"data: x\n\n")
    assert told == b"id: call/0.0.1~7.18446744073709551615~ab12.\ndata: x\n\n"
    read = StreamCursor.parse("call/0.0.1~7.18446744073709551615~ab12.", SIZES)
    assert (read.call, read.origin()) == ("call", origin)
    assert StreamCursor.parse("call/0.0.1", SIZES).origin() is None


def test_events_of_the_prompt_are_told_before_the_first_token_and_not_again():
    of_prompt = CompletionDelta(0, "", [])
    assert StreamCursor("a", [1]).mark(0, of_prompt, b"data: 1\n\n") == b"id: a/0\ndata: 1\n\n"
    assert StreamCursor.parse("a/1", [1]).mark(0, of_prompt, b"data: 1\n\n") == b""


def test_the_id_stands_with_the_last_event_of_a_delta():
    delta = CompletionDelta(1, "", [5])
    assert StreamCursor("a/b", [2]).mark(0, delta, b"data: 1\n\ndata: 2\n\n") == b"data: 1\n\nid: a/b/0.1\ndata: 2\n\n"
    assert StreamCursor.parse("a/b/0.1", [2]).call == "a/b"


@pytest.mark.parametrize(
    "event_id",
    [
        "",
        "7",
        "a/",
        "a/x",
        "a/1",
        "a/1.2.3",
        "/1.2",
        "a/1.-2",
        "a/1.٣",
        "a/1." + "9" * 30,
        "a/1.2~7",
        "a/1.2~7.8~x.y",
        "a/1.2~~",
        "a/1.2~7~x~",
    ],
)
def test_what_is_no_id_of_this_call_is_refused(event_id):
    with pytest.raises(InvalidRequestError, match="Last-Event-ID"):
        StreamCursor.parse(event_id, [2])
