"""Codex CLI over Responses: tools, reasoning, errors, a resumed session."""

import json
from pathlib import Path
from typing import Any

import pytest
from common import KEY, KINDS, KNOWN_MODEL, MODEL, QUIET, SERVERS, script
from programs import PROJECT, lines, new_home, program, run_agent

NOTE = "The note says seven."
CONFIG = """
model = "{model}"
model_provider = "penstock"
check_for_update_on_startup = false
{more}

[model_providers.penstock]
name = "Penstock"
base_url = "{url}/v1"
env_key = "PENSTOCK_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
"""


def home_for(kind: str, more: str, model: str = MODEL) -> Path:
    """A home with the agent's settings."""
    home = new_home()
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CONFIG.format(url=SERVERS[kind], model=model, more=more))
    return home


def codex(home: Path, *flags: str) -> list[dict[str, Any]]:
    """The events of a run."""
    command = [program("codex"), "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", *flags]
    return lines(run_agent(command, home, {"PENSTOCK_API_KEY": KEY}))


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The finished items of a kind."""
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def last(events: list[dict[str, Any]]) -> str:
    """The agent's answer."""
    assert events[-1]["type"] == "turn.completed", events[-1]
    text = items(events, "agent_message")[-1]["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("effort", ["", "none", "low", "high"])
@KINDS
def test_loop(kind: str, effort: str) -> None:
    more = f'model_reasoning_effort = "{effort}"' if effort else ""
    events = codex(home_for(kind, more), script("codex-loop"))
    done = [(item["exit_code"], item["aggregated_output"].strip()) for item in items(events, "command_execution")]
    assert done == [(0, "hi"), (0, "seven")]
    assert last(events) == NOTE


@KINDS
def test_a_command_that_fails(kind: str) -> None:
    events = codex(home_for(kind, ""), script("codex-error"))
    assert items(events, "command_execution")[0]["exit_code"] == 1
    assert last(events) == NOTE


@pytest.mark.parametrize("name", ["codex-unknown", "codex-broken"])
@KINDS
def test_calls_that_are_none(name: str, kind: str) -> None:
    last(codex(home_for(kind, ""), script(name)))


@KINDS
def test_a_session_goes_on(kind: str) -> None:
    home = home_for(kind, "")
    last(codex(home, script("codex-loop")))
    events = codex(home, "resume", "--last", script("codex-error"))
    assert last(events) == NOTE


@KINDS
def test_a_patch_by_a_custom_tool(kind: str) -> None:
    """Codex offers apply_patch, a custom tool, to models that it knows by name."""
    events = codex(home_for(kind, "", model=KNOWN_MODEL), script("codex-patch"))
    assert (PROJECT / "note.txt").read_text() == "eight\n"
    assert last(events) == NOTE


@pytest.mark.parametrize("kind", QUIET)  # in harmony a grammar forces tokens that no script says, from the start on
def test_a_schema_of_the_answer(kind: str) -> None:
    home = home_for(kind, "")
    fields = {"text": {"type": "string"}}
    schema = {"type": "object", "properties": fields, "required": ["text"], "additionalProperties": False}
    (home / "schema.json").write_text(json.dumps(schema))
    last(codex(home, "--output-schema", str(home / "schema.json"), script("plain")))
