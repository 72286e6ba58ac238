"""Claude Code: tools, reasoning, errors, and a conversation of ten turns."""

from typing import Any

import pytest
from common import KEY, KINDS, MODEL, SERVERS, script
from programs import PROJECT, lines, new_home, program, run_agent

NOTE = "The note says seven."


def claude(kind: str, name: str, *flags: str, **variables: str) -> list[dict[str, Any]]:
    """The events of a run."""
    settings = {
        "ANTHROPIC_BASE_URL": SERVERS[kind],
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [program("claude"), "-p", script(name), "--output-format", "stream-json", "--verbose"]
    command += ["--allowedTools", "Bash,Read", *flags]
    return lines(run_agent(command, new_home(), settings | variables))


def called_by(events: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Tools and their arguments."""
    blocks = (block for event in events if event["type"] == "assistant" for block in event["message"]["content"])
    return [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]


def results_in(events: list[dict[str, Any]]) -> list[str]:
    """What the tools returned."""
    blocks = (block for event in events if event["type"] == "user" for block in event["message"]["content"])
    return [str(block["content"]) for block in blocks if block["type"] == "tool_result"]


def last(events: list[dict[str, Any]]) -> str:
    """The agent's answer."""
    (result,) = (event for event in events if event["type"] == "result")
    assert not result["is_error"], result
    answer = result["result"]
    assert isinstance(answer, str)
    return answer


@KINDS
def test_loop(kind: str) -> None:
    events = claude(kind, "claude-loop")
    assert [arguments["command"] for _, arguments in called_by(events)] == ["echo hi", "cat note.txt"]
    assert results_in(events) == ["hi", "seven"]
    assert last(events) == NOTE


@KINDS
def test_loop_without_thinking(kind: str) -> None:
    assert last(claude(kind, "claude-loop", MAX_THINKING_TOKENS="0")) == NOTE


@KINDS
def test_loop_with_a_budget_of_thinking(kind: str) -> None:
    assert (
        last(claude(kind, "claude-loop", MAX_THINKING_TOKENS="2048", CLAUDE_CODE_DISABLE_ADAPTIVE_THINKING="1")) == NOTE
    )


@pytest.mark.parametrize("effort", ["low", "max"])
@KINDS
def test_efforts(kind: str, effort: str) -> None:
    assert last(claude(kind, "claude-loop", "--effort", effort)) == NOTE


@KINDS
def test_read(kind: str) -> None:
    events = claude(kind, "read")
    assert called_by(events) == [("Read", {"file_path": str(PROJECT / "note.txt")})]
    assert "seven" in results_in(events)[0]
    assert last(events) == NOTE


@KINDS
def test_a_command_that_fails(kind: str) -> None:
    events = claude(kind, "claude-error")
    assert "missing.txt" in results_in(events)[0]
    assert last(events) == NOTE


@pytest.mark.parametrize("name", ["claude-unknown", "claude-broken"])
@KINDS
def test_calls_that_are_none(name: str, kind: str) -> None:
    last(claude(kind, name))


@KINDS
def test_a_call_that_max_tokens_breaks(kind: str) -> None:
    last(claude(kind, "claude-long", CLAUDE_CODE_MAX_OUTPUT_TOKENS="60"))


@KINDS
def test_a_schema_of_the_answer(kind: str) -> None:
    schema = '{"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}'
    last(claude(kind, "claude-structured", "--json-schema", schema))


def test_ten_turns() -> None:
    """tools/agents_prefix.py counts what of them was found in the cache."""
    events = claude("hermes", "ten")
    assert results_in(events) == [str(number) for number in range(1, 10)]
    assert last(events) == "Counted."
