"""What the suites of agents and SDKs share: the servers, the tools, and what the script models say (scripts.py)."""

import json
import os

import pytest

SERVERS: dict[str, str] = json.loads(os.environ["PENSTOCK_SERVERS"])
"""Addresses by the kind of model: hermes, strict, harmony, and smollm2, which is real."""
KEY = os.environ["PENSTOCK_KEY"]
MODEL = "penstock"
KNOWN_MODEL = "gpt-5.5"
"""A name of the same model that agents know."""
SCRIPTED = [kind for kind in SERVERS if kind != "smollm2"]
QUIET = [kind for kind in SCRIPTED if kind != "harmony"]
"""Models whose reasoning can be turned off."""

KINDS = pytest.mark.parametrize("kind", SCRIPTED)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
HOW = pytest.mark.parametrize(
    ("kind", "thinks"),
    [*((kind, True) for kind in SCRIPTED), *((kind, False) for kind in QUIET)],
    ids=lambda value: value if isinstance(value, str) else "thinks" if value else "quiet",
)

ANSWER = "The answer is 42."
CALLED = ["lookup", "add"]
"""The tools that the script "loop" calls."""
FEW_TOKENS = 40
"""They break off a call of the script "broken", and reasoning of the script "thinking"."""


def script(name: str) -> str:
    """A user's message that begins a script."""
    return f"SCRIPT={name}. Do what it takes."


def lookup(query: str) -> str:
    """Look something up."""
    if query == "nothing":
        raise LookupError("nothing is known about it")
    return f"{query}: 40"


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


TOOLS = {"lookup": lookup, "add": add}


def run_tool(name: str, arguments: object) -> tuple[str, bool]:
    """What a tool returns, and whether it failed; never an exception."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        assert isinstance(given, dict)
        return TOOLS[name](**given), False
    except Exception as error:
        return f"{type(error).__name__}: {error}", True


_QUERY = {"query": {"type": "string"}}
_NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
SCHEMAS = {
    name: {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    for name, fields in (("lookup", _QUERY), ("add", _NUMBERS))
}
DESCRIPTIONS = {"lookup": "Look something up.", "add": "Add two numbers."}
