"""aider over chat completions and Anthropic's messages: it edits a file by a text, without tools."""

import pytest
from common import KEY, KINDS, MODEL, SERVERS, STREAMED, script
from programs import PROJECT, new_home, program, run_agent

DIALECTS = pytest.mark.parametrize("dialect", ["openai", "anthropic"])


def aider(dialect: str, kind: str, question: str, *flags: str) -> str:
    """What a run prints."""
    home = new_home()
    variables = {
        "OPENAI_API_BASE": f"{SERVERS[kind]}/v1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_API_BASE": SERVERS[kind],
        "ANTHROPIC_API_KEY": KEY,
        "AIDER_ANALYTICS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [program("aider"), "--model", f"{dialect}/{MODEL}", "--edit-format", "whole", "--no-git", "--yes-always"]
    command += ["--no-check-update", "--no-show-model-warnings", "--no-pretty", "--no-gitignore", "--no-browser"]
    command += ["--analytics-disable", "--no-detect-urls", *flags, "--message", question]
    return run_agent(command, home, variables)


@DIALECTS
@STREAMED
@KINDS
def test_edit(dialect: str, stream: bool, kind: str) -> None:
    aider(dialect, kind, script("text-edit"), "--stream" if stream else "--no-stream", "note.txt")
    assert (PROJECT / "note.txt").read_text() == "eight\n"


@pytest.mark.parametrize("effort", ["low", "high"])
@KINDS
def test_efforts(effort: str, kind: str) -> None:
    flags = ("--reasoning-effort", effort, "--no-check-model-accepts-settings")
    assert "Hello there" in aider("openai", kind, script("plain"), *flags)


@DIALECTS
def test_a_real_model(dialect: str) -> None:
    aider(dialect, "smollm2", "How many days are there in a week?")
