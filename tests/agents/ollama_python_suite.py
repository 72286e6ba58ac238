"""ollama's Python package: chats and prompts, whole and streamed; each message is sent back as history."""

import asyncio
import json
from typing import Any

import ollama
import pytest
from common import (
    ANSWER,
    CALLED,
    DESCRIPTIONS,
    FEW_TOKENS,
    HOW,
    KEY,
    KINDS,
    MODEL,
    SCHEMAS,
    SERVERS,
    STREAMED,
    run_tool,
    script,
)

HEADERS = {"authorization": f"Bearer {KEY}"}
CLIENTS = {kind: ollama.Client(url, headers=HEADERS) for kind, url in SERVERS.items()}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": SCHEMAS[name]}}
    for name in SCHEMAS
]
FORM = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
MOST_TURNS = 6


def joined(parts: list[ollama.ChatResponse]) -> ollama.Message:
    """The message of a stream."""
    message = ollama.Message(role="assistant", content="".join(part.message.content or "" for part in parts))
    message.thinking = "".join(part.message.thinking or "" for part in parts) or None
    message.tool_calls = [call for part in parts for call in part.message.tool_calls or ()] or None
    assert parts[-1].done
    assert not any(part.done for part in parts[:-1])
    return message


def ask(kind: str, stream: bool, **body: Any) -> ollama.Message:
    if not stream:
        return CLIENTS[kind].chat(MODEL, **body).message
    return joined(list(CLIENTS[kind].chat(MODEL, stream=True, **body)))


def loop(kind: str, stream: bool, name: str, **body: Any) -> tuple[list[str], list[ollama.Message]]:
    """The names of the called tools, and the model's messages."""
    messages: list[Any] = [{"role": "user", "content": script(name)}]
    called, said = [], []
    for _ in range(MOST_TURNS):
        message = ask(kind, stream, messages=messages, tools=TOOLS, **body)
        messages.append(message)
        said.append(message)
        if not message.tool_calls:
            return called, said
        for call in message.tool_calls:
            called.append(call.function.name)
            result, _ = run_tool(call.function.name, dict(call.function.arguments))
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    raise AssertionError("the loop does not end")


@HOW
@STREAMED
def test_loop(kind: str, thinks: bool, stream: bool) -> None:
    called, said = loop(kind, stream, "loop", think=thinks, keep_alive="5m", options={"num_ctx": 8192})
    assert called == CALLED
    assert said[-1].content == ANSWER
    assert bool(said[0].thinking) == thinks


@pytest.mark.parametrize("name", ["error", "unknown"])
@KINDS
def test_failing_tools(kind: str, name: str) -> None:
    assert loop(kind, True, name)[1][-1].content == ANSWER


@KINDS
@STREAMED
def test_a_call_that_is_cut_off(kind: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": script("broken")}], "tools": TOOLS}
    ask(kind, stream, options={"num_predict": FEW_TOKENS}, **body)


@KINDS
@STREAMED
@pytest.mark.parametrize("form", ["json", FORM], ids=["json", "schema"])
def test_forms(kind: str, stream: bool, form: Any) -> None:
    message = ask(kind, stream, messages=[{"role": "user", "content": script("plain")}], format=form)
    assert isinstance(json.loads(message.content or ""), dict)


@KINDS
def test_prompts(kind: str) -> None:
    async def generated() -> tuple[ollama.GenerateResponse, list[ollama.GenerateResponse]]:
        client = ollama.AsyncClient(SERVERS[kind], headers=HEADERS)
        body: dict[str, Any] = {"prompt": script("plain"), "system": "Be brief.", "logprobs": True, "top_logprobs": 1}
        parts = [part async for part in await client.generate(MODEL, stream=True, **body)]
        return await client.generate(MODEL, **body), parts

    whole, parts = asyncio.run(generated())
    assert whole.response == "".join(part.response or "" for part in parts) == "Hello there, I am fine."
    assert len(whole.logprobs or ()) == whole.eval_count
    assert whole.context == parts[-1].context


@pytest.mark.parametrize("level", ["low", "high", "max"])
@KINDS
def test_levels(kind: str, level: str) -> None:
    message = ask(kind, False, messages=[{"role": "user", "content": script("plain")}], think=level)
    assert message.thinking == "A greeting."


@KINDS
def test_what_is_served(kind: str) -> None:
    client = CLIENTS[kind]
    name = client.list().models[0].model
    assert name is not None
    assert {"completion", "tools", "thinking"} <= set(client.show(name).capabilities or ())
    assert client.ps().models[0].model == name
    assert client.pull(name).status == "success"


def test_a_real_model() -> None:
    message = ask("smollm2", True, messages=[{"role": "user", "content": "Name a colour."}], options={"num_predict": 8})
    assert message.content
