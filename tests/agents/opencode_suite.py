"""OpenCode over chat completions, and over Anthropic's messages: tools, errors, a session that goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from common import KEY, KINDS, MODEL, SERVERS, script
from programs import lines, new_home, program, run_agent

NOTE = "The note says seven."
PACKAGES = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "anthropic": "@ai-sdk/anthropic"}
DIALECTS = pytest.mark.parametrize("dialect", PACKAGES)
OFF = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}


def home_for(dialect: str, kind: str) -> Path:
    """A home with the agent's settings."""
    home = new_home()
    model = {"name": "Penstock", "reasoning": True, "tool_call": True, "limit": {"context": 131072, "output": 32000}}
    options = {"baseURL": f"{SERVERS[kind]}/v1", "apiKey": KEY}
    provider = {"npm": PACKAGES[dialect], "name": "Penstock", "options": options, "models": {MODEL: model}}
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"penstock/{MODEL}",
        "small_model": f"penstock/{MODEL}",
        "provider": {"penstock": provider},
        "autoupdate": False,
        "share": "disabled",
    }
    (home / ".config" / "opencode").mkdir(parents=True)
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(settings))
    return home


def opencode(home: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    """The events of a run."""
    command = [program("opencode"), "run", "--format", "json", "--auto", *flags, script(name)]
    return lines(run_agent(command, home, OFF))


def results_in(events: list[dict[str, Any]]) -> list[str]:
    """What the tools returned."""
    parts = (event["part"] for event in events if event["type"] == "tool_use")
    return [str(part["state"].get("output", part["state"].get("error"))).strip() for part in parts]


def last(events: list[dict[str, Any]]) -> str:
    """The agent's answer."""
    assert not [event for event in events if event["type"] == "error"], events
    text = [event["part"]["text"] for event in events if event["type"] == "text"][-1]
    assert isinstance(text, str)
    return text.strip()


@DIALECTS
@KINDS
def test_loop(dialect: str, kind: str) -> None:
    events = opencode(home_for(dialect, kind), "opencode-loop")
    assert results_in(events) == ["hi", "seven"]
    assert last(events) == NOTE


@pytest.mark.parametrize("effort", ["low", "high"])
@KINDS
def test_efforts(effort: str, kind: str) -> None:
    assert last(opencode(home_for("chat", kind), "opencode-loop", "--variant", effort)) == NOTE


@DIALECTS
@KINDS
def test_a_command_that_fails(dialect: str, kind: str) -> None:
    events = opencode(home_for(dialect, kind), "opencode-error")
    assert "missing.txt" in results_in(events)[0]
    assert last(events) == NOTE


@pytest.mark.parametrize("name", ["opencode-unknown", "opencode-broken"])
@KINDS
def test_calls_that_are_none(name: str, kind: str) -> None:
    opencode(home_for("chat", kind), name)


@KINDS
def test_a_session_goes_on(kind: str) -> None:
    home = home_for("chat", kind)
    opencode(home, "opencode-loop")
    assert last(opencode(home, "opencode-error", "--continue")) == NOTE
