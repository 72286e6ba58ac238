"""The share of each turn that the next one finds in the cache."""

import json

import pytest

from tools.agents_prefix import TEN_TURNS, Usage, prefix_lines, reused_shares, usage_of
from tools.agents_proxy import Exchange

STREAM = """event: message_start
data: {"type": "message_start", "message": {"usage": {"input_tokens": 30, "output_tokens": 1}}}

event: message_delta
data: {"type": "message_delta", "usage": {"output_tokens": 10}}
"""


def test_the_usage_of_whole_and_streamed_answers() -> None:
    whole = {"usage": {"input_tokens": 5, "cache_read_input_tokens": 38, "output_tokens": 7}}
    assert usage_of(json.dumps(whole)) == Usage(5, 38, 7)
    assert usage_of(STREAM) == Usage(30, 0, 10)


def test_shares_are_of_all_tokens_of_the_turn_before() -> None:
    assert reused_shares([Usage(30, 0, 10), Usage(5, 38, 7), Usage(1, 50, 1)]) == pytest.approx([38 / 40, 1.0])


def test_only_the_conversation_of_ten_turns_is_counted() -> None:
    def turn(text: str, tools: list[str], cached: int) -> Exchange:
        usage = {"input_tokens": 100 - cached, "cache_read_input_tokens": cached, "output_tokens": 0}
        body = {"messages": [{"content": text}], "tools": tools}
        return Exchange("POST", "/v1/messages?beta=true", {}, body, 200, json.dumps({"usage": usage}))

    ten = [turn(f"{TEN_TURNS} Count.", ["Bash"], cached) for cached in (0, 99)]
    others = [turn(f"A title for {TEN_TURNS}", [], 0), turn("hi", ["Bash"], 0)]
    assert prefix_lines([*others, *ten]) == ["found again of the turn before: 99.0% (100 tokens)"]
    assert prefix_lines(others) == []
