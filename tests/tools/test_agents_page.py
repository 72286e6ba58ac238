"""docs/agents.md says which fields of each client have no effect; the recorded bodies are the truth."""

import re
from pathlib import Path

import pytest

from penstock.server.anthropic.schema import CountTokensBody, MessagesBody
from penstock.server.ollama.schema import ChatBody as OllamaChatBody
from penstock.server.ollama.schema import GenerateBody as OllamaGenerateBody
from penstock.server.openai.responses_schema import ResponsesBody
from penstock.server.openai.responses_tools import ignored_tools
from penstock.server.openai.schema import ChatBody
from tools.agents_bodies import read_requests

ROOT = Path(__file__).parents[2]
NAMES = {
    "codex-cli": "codex",
    "@anthropic-ai/sdk-node": "anthropic-node",
    "openai-agents-sdk-python": "openai-agents-python",
}
NAMES |= {"openai-agents-sdk-node": "openai-agents-node"}
BODIES = {"/api/chat": OllamaChatBody, "/api/generate": OllamaGenerateBody}
BODIES |= {"/count_tokens": CountTokensBody, "/messages": MessagesBody, "/responses": ResponsesBody, "/chat/": ChatBody}


def rows():
    for line in (ROOT / "docs" / "agents.md").read_text().splitlines():
        if found := re.match(r"\| \[([^\]]+)\]\([^)]*\)(?:, (Python|Node))? \|.*\| ([^|]*)\|$", line):
            name = "-".join(filter(None, (found[1], found[2]))).lower().replace(" ", "-")
            yield NAMES.get(name, name), set(re.findall(r"`([^`]+)`", found[3]))


def ignored(client):
    fields = set()
    for request in read_requests(ROOT / "tests" / "agents" / "bodies" / f"{client}.json"):
        if "thread" in request["body"]:  # refused, and sent again without it
            continue
        kind = next((body for part, body in BODIES.items() if part in request["path"]), None)
        if kind is None:
            continue
        body = kind.model_validate(request["body"])
        fields |= body.ignored_fields().hints.keys() | body.ignored_fields().unknown.keys()
        if getattr(body, "keep_alive", None) is not None:  # which a call without a prompt reads
            fields.add("keep_alive")
        if isinstance(body, ResponsesBody):
            fields |= {*ignored_tools(body, []), *(["include"] if body.include else [])}
    return fields


@pytest.mark.parametrize(("client", "named"), [*rows()], ids=lambda one: one if isinstance(one, str) else "")
def test_the_page_names_what_has_no_effect(client, named):
    assert named == ignored(client)


def test_each_client_has_a_row():
    bodies = {file.stem for file in (ROOT / "tests" / "agents" / "bodies").glob("*.json")}
    assert {client for client, _ in rows()} == bodies
