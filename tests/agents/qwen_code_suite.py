"""Qwen Code over chat completions and Anthropic's messages: tools, reasoning, errors."""

import json
from typing import Any

import pytest
from common import KEY, KINDS, MODEL, SERVERS, script
from programs import new_home, program, run_agent

NOTE = "The note says seven."


def qwen(kind: str, name: str, dialect: str = "openai", **generation: Any) -> list[dict[str, Any]]:
    """The messages of a run."""
    home = new_home()
    base, variable = (
        (f"{SERVERS[kind]}/v1", "PENSTOCK_API_KEY") if dialect == "openai" else (SERVERS[kind], "PENSTOCK_API_KEY")
    )
    model = {"id": MODEL, "baseUrl": base, "envKey": variable, "generationConfig": {"maxRetries": 0, **generation}}
    settings = {
        "security": {"auth": {"selectedType": dialect}},
        "modelProviders": {dialect: [model]},
        "model": {"name": MODEL},
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    (home / ".qwen").mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    command = [program("qwen"), "--yolo", "--output-format", "json", "--model", MODEL, "-p", script(name)]
    events = json.loads(run_agent(command, home, {variable: KEY, "QWEN_TELEMETRY_ENABLED": "false"}))
    assert isinstance(events, list)
    return events


def results_in(events: list[dict[str, Any]]) -> list[str]:
    """What the tools returned."""
    blocks = (block for event in events if event["type"] == "user" for block in event["message"]["content"])
    return [str(block["content"]) for block in blocks if isinstance(block, dict) and block["type"] == "tool_result"]


def last(events: list[dict[str, Any]]) -> str:
    """The agent's answer."""
    assert events[-1]["type"] == "result", events[-1]
    assert not events[-1]["is_error"], events[-1]
    answer = events[-1]["result"]
    assert isinstance(answer, str)
    return answer


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
@KINDS
def test_loop(dialect: str, kind: str) -> None:
    events = qwen(kind, "qwen-loop", dialect)
    first, second = results_in(events)
    assert "hi" in first
    assert "seven" in second
    assert last(events).endswith(NOTE)


@pytest.mark.parametrize("reasoning", [False, {"effort": "low"}, {"effort": "high"}])
@KINDS
def test_reasoning(reasoning: object, kind: str) -> None:
    assert last(qwen(kind, "qwen-loop", reasoning=reasoning)).endswith(NOTE)


@KINDS
def test_a_command_that_fails(kind: str) -> None:
    events = qwen(kind, "qwen-error")
    assert "missing.txt" in results_in(events)[0]
    assert last(events).endswith(NOTE)


@pytest.mark.parametrize("name", ["qwen-unknown", "qwen-broken"])
@KINDS
def test_calls_that_are_none(name: str, kind: str) -> None:
    qwen(kind, name)
