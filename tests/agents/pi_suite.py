"""pi over each of its three dialects: tools, levels of thinking, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from common import KEY, KINDS, MODEL, SERVERS, script
from programs import lines, new_home, program, run_agent

NOTE = "The note says seven."
DIALECTS = pytest.mark.parametrize("dialect", ["openai-completions", "openai-responses", "anthropic-messages"])


def home_for(dialect: str, kind: str, max_tokens: int = 32_000) -> Path:
    """A home with the agent's settings."""
    home = new_home()
    base = SERVERS[kind] if dialect == "anthropic-messages" else f"{SERVERS[kind]}/v1"
    model = {"id": MODEL, "reasoning": True, "contextWindow": 131072, "maxTokens": max_tokens}
    provider = {"baseUrl": base, "api": dialect, "apiKey": KEY, "models": [model]}
    (home / ".pi" / "agent").mkdir(parents=True)
    (home / ".pi" / "agent" / "models.json").write_text(json.dumps({"providers": {"penstock": provider}}))
    return home


def pi(home: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    """The events of a run."""
    command = [program("pi"), "--print", "--mode", "json", "--offline", "--provider", "penstock", "--model", MODEL]
    variables = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
    return lines(run_agent([*command, *flags, script(name)], home, variables))


def messages_of(events: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """The finished messages of a role."""
    ended = (event["message"] for event in events if event["type"] == "message_end")
    return [message for message in ended if message["role"] == role]


def results_in(events: list[dict[str, Any]]) -> list[str]:
    """What the tools returned."""
    return [message["content"][0]["text"].strip() for message in messages_of(events, "toolResult")]


def last(events: list[dict[str, Any]]) -> str:
    """The agent's answer."""
    message = messages_of(events, "assistant")[-1]
    assert message["stopReason"] == "stop", message
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


@pytest.mark.parametrize("thinking", ["off", "minimal", "medium", "high"])
@DIALECTS
@KINDS
def test_loop(thinking: str, dialect: str, kind: str) -> None:
    events = pi(home_for(dialect, kind), "pi-loop", "--thinking", thinking)
    assert results_in(events) == ["hi", "seven"]
    assert last(events) == NOTE


@DIALECTS
@KINDS
def test_a_command_that_fails(dialect: str, kind: str) -> None:
    events = pi(home_for(dialect, kind), "pi-error")
    assert "missing.txt" in results_in(events)[0]
    assert last(events) == NOTE


@pytest.mark.parametrize("name", ["pi-unknown", "pi-broken"])
@DIALECTS
@KINDS
def test_calls_that_are_none(name: str, dialect: str, kind: str) -> None:
    pi(home_for(dialect, kind), name)


@DIALECTS
@KINDS
def test_a_session_goes_on(dialect: str, kind: str) -> None:
    home = home_for(dialect, kind)
    pi(home, "pi-loop")
    assert last(pi(home, "pi-error", "--continue")) == NOTE


@DIALECTS
def test_a_real_model(dialect: str) -> None:
    """Without tools: the real model might call a harmful command."""
    events = pi(home_for(dialect, "smollm2", max_tokens=32), "plain", "--no-tools")
    assert messages_of(events, "assistant")[-1]["stopReason"] in ("stop", "length")
