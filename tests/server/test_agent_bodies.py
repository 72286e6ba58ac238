"""Requests as agents and SDKs really send them, recorded by scripts/agents in tests/agents/bodies; those of programs
that are not run here, in tests/agents/written_bodies, are written after their sources.

Each client meets one of the kinds of models; with `TEST_BODIES=all` every one.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.scripts import scripts
from tests.server.running import RunningServer, running_server
from tests.support import fetch
from tests.support.script_model import HARMONY, HERMES, STRICT, Kind, write_kind
from tools.agents_bodies import read_requests
from tools.agents_prefix import Usage, reused_shares, usage_of

AGENTS = Path(__file__).parents[1] / "agents"
BODIES = sorted([*AGENTS.glob("bodies/*.json"), *AGENTS.glob("written_bodies/*.json")])
KINDS = (HERMES, STRICT, HARMONY)
MEETINGS = [
    pytest.param(kind, bodies, id=f"{kind.template.partition('.')[0]}-{bodies.stem}")
    for place, kind in enumerate(KINDS)
    for number, bodies in enumerate(BODIES)
    if number % len(KINDS) == place or "TEST_BODIES" in os.environ
]
PROJECT = Path("/home/agent/project")
TURNS = 10
LEAST_SHARE = 0.95
"""Of a turn's tokens, those that the next turn finds again."""


@pytest.fixture(scope="module")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Kind], RunningServer]]:
    """The server of a kind of model, which starts when it is first asked for."""
    names = ("--served-model-name", "penstock,gpt-5.5", "--threads", "1")
    started: dict[str, RunningServer] = {}
    with ExitStack() as running:

        def start(kind: Kind) -> RunningServer:
            if kind.template not in started:
                folder = write_kind(tmp_path_factory.mktemp("script-model"), kind, scripts(PROJECT))
                started[kind.template] = running.enter_context(running_server("--model", str(folder), *names))
            return started[kind.template]

        yield start


@pytest.mark.parametrize(("kind", "bodies"), MEETINGS)
def test_every_request_of_a_client_is_answered(
    server_of: Callable[[Kind], RunningServer], kind: Kind, bodies: Path
) -> None:
    for request in read_requests(bodies):
        answer = send(server_of(kind), request["path"], request["headers"], request["body"])
        assert answer.status_code == 200, (answer.text[:1000], json.dumps(request["body"])[:2000])
        if "json" not in (kind_of_answer := answer.headers["content-type"]):
            assert_complete(answer.text)
        elif "ndjson" in kind_of_answer:
            *_, last = map(json.loads, answer.text.splitlines())
            assert last["done"], last


def send(server: RunningServer, path: str, headers: dict[str, str], body: dict[str, Any]) -> httpx.Response:
    """Post a recorded request."""
    return fetch.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def assert_complete(events: str) -> None:
    """A stream ends with the last event of its dialect, and has none of an error."""
    data = [line[len("data: ") :] for line in events.splitlines() if line.startswith("data: ")]
    last = data[-1] if data[-1] == "[DONE]" else json.loads(data[-1])["type"]
    assert last in ("[DONE]", "message_stop", "response.completed", "response.incomplete"), data[-1]
    kinds = [json.loads(item) for item in data if item != "[DONE]"]
    assert not [event for event in kinds if "error" in event and event["error"] is not None], data


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.template.partition(".")[0])
def test_turns_of_claude_code_find_the_turns_before_them_in_the_cache(
    server_of: Callable[[Kind], RunningServer], kind: Kind
) -> None:
    """Its hash in the first block of the system's text changes from request to request."""
    path = next(path for path in BODIES if path.stem == "claude-code")
    first = next(request for request in read_requests(path) if request["body"].get("tools"))
    body = first["body"] | {"stream": False}
    body["messages"] = [{"role": "user", "content": "SCRIPT=ten. Count."}, *body["messages"][1:2]]
    turns: list[Usage] = []
    for turn in range(TURNS):
        body["system"] = [billed(block, turn) for block in body["system"]]
        answer = send(server_of(kind), first["path"], first["headers"], body)
        assert answer.status_code == 200, answer.text
        turns.append(usage_of(answer.text))
        content = answer.json()["content"]
        body["messages"] += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": results_of(content)},
        ]
    shares = reused_shares(turns)
    print("found again of the turn before:", *(f"{share:.1%}" for share in shares))
    assert len(shares) == TURNS - 1
    assert min(shares) >= LEAST_SHARE, shares


def billed(block: dict[str, Any], turn: int) -> dict[str, Any]:
    """A block of the system's text; the one about billing with a hash of its own, as many versions write it."""
    if not block["text"].startswith("x-anthropic-billing-header"):
        return block
    return block | {
        "text": f"x-anthropic-billing-header: cc_version=2.1.332.5c3; cc_entrypoint=sdk-cli; cch={turn:05x};"
    }


def results_of(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of an answer's calls."""
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": "done"} for call in calls]
    return results or [{"type": "text", "text": "Go on."}]
