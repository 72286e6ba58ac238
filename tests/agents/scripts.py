"""What the script models say to agents: a call, another call, an answer; and what goes wrong in between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.script_model import Call, Turn

ANSWER = "The answer is 42."
NOTE = "The note says seven."
LONG = " ".join(f"word{number}" for number in range(200))
"""The argument of a call that a small `max_tokens` breaks off."""
PATCH = "*** Begin Patch\n*** Update File: note.txt\n@@\n-seven\n+eight\n*** End Patch"
TEN = 10
"""Turns of the conversation whose prompts must be found in the cache."""


@dataclass(frozen=True, slots=True)
class Shell:
    """The tool with which an agent runs commands, as the agent names it."""

    agent: str
    name: str
    command: str = "command"
    """The argument that is the command."""
    others: Mapping[str, Any] | None = None

    def call(self, command: str) -> Call:
        return Call(self.name, {self.command: command, **(self.others or {})})

    @property
    def broken(self) -> Call:
        return Call(self.name, f'{{"{self.command}": "echo brok')


SHELLS = (
    Shell("claude", "Bash", others={"description": "Say or read"}),
    Shell("codex", "exec_command", "cmd"),
    Shell("opencode", "bash", others={"description": "Say or read"}),
    Shell("qwen", "run_shell_command", others={"is_background": False}),
    Shell("pi", "bash"),
)


def scripts(project: Path) -> dict[str, Sequence[Turn]]:
    """All scripts by name.

    Args:
        project: the folder in which agents work, with a file note.txt.
    """
    made: dict[str, Sequence[Turn]] = {
        "plain": (Turn("Hello there, I am fine.", thought="A greeting."),),
        "loop": (
            Turn(thought="I look it up.", calls=(Call("lookup", {"query": "café ☕"}),)),
            Turn("Now I add.", calls=(Call("add", {"a": 40, "b": 2}),)),
            Turn(ANSWER, thought="That is all."),
        ),
        "error": (
            Turn("I try.", calls=(Call("lookup", {"query": "nothing"}),)),
            Turn(ANSWER),
        ),
        "unknown": (Turn(calls=(Call("frobnicate", {"level": 3}),)), Turn(ANSWER)),
        "broken": (Turn(calls=(Call("lookup", {"query": LONG}),)), Turn(ANSWER)),
        "thinking": (Turn(thought=LONG.replace("word", "thought")), Turn(ANSWER)),
        "text-edit": (Turn("note.txt\n```\neight\n```\n", thought="I write eight."),),
        "read": (
            Turn(calls=(Call("Read", {"file_path": str(project / "note.txt")}),), thought="I read it."),
            Turn(NOTE),
        ),
        "ten": (
            *(Turn(calls=(SHELLS[0].call(f"echo {number}"),)) for number in range(1, TEN)),
            Turn("Counted."),
        ),
        "claude-long": (Turn("I count.", calls=(SHELLS[0].call(f"echo {LONG}"),)), Turn(NOTE)),
        "codex-patch": (Turn("I write eight.", calls=(Call("apply_patch", {"input": PATCH}),)), Turn(NOTE)),
        "claude-structured": (Turn(calls=(Call("StructuredOutput", {"text": "seven"}),)), Turn(NOTE)),
    }
    for shell in SHELLS:
        made |= _shell_scripts(shell)
    return made


def _shell_scripts(shell: Shell) -> dict[str, Sequence[Turn]]:
    """The scripts for an agent that runs commands."""
    named: dict[str, Sequence[Turn]] = {
        "loop": (
            Turn(thought="I say hi.", calls=(shell.call("echo hi"),)),
            Turn("Now I read the note.", calls=(shell.call("cat note.txt"),)),
            Turn(NOTE, thought="That is all."),
        ),
        "error": (Turn(calls=(shell.call("cat missing.txt"),)), Turn(NOTE)),
        "unknown": (Turn(calls=(Call("frobnicate", {"level": 3}),)), Turn(NOTE)),
        "broken": (Turn(calls=(shell.broken,)), Turn(NOTE)),
    }
    return {f"{shell.agent}-{name}": turns for name, turns in named.items()}
