"""LiteLLM's providers that reach Penstock: loops of tools with reasoning, and Anthropic's messages over each."""

import asyncio

import litellm
import pytest
from common import ANSWER, CALLED, DESCRIPTIONS, KEY, KINDS, MODEL, SCHEMAS, SERVERS, STREAMED, run_tool, script

litellm.telemetry = False
litellm.suppress_debug_info = True
TOOLS = [
    {"type": "function", "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": SCHEMAS[name]}}
    for name in SCHEMAS
]
BLOCK_TOOLS = [{"name": name, "description": DESCRIPTIONS[name], "input_schema": SCHEMAS[name]} for name in SCHEMAS]
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
REASONING = {
    "unset": {},
    "effort": {"reasoning_effort": "high"},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
}
MOST_TURNS = 6


def place(provider, kind):
    base = SERVERS[kind] if provider == "anthropic" else f"{SERVERS[kind]}/v1"
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY, "num_retries": 0, "max_retries": 0}


def ask(provider, kind, stream, messages, **options):
    """A message; a streamed one is put together by LiteLLM."""
    given = {**place(provider, kind), "messages": messages, "allowed_openai_params": ["reasoning_effort", "thinking"]}
    answer = litellm.completion(**given, stream=stream, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


def tool_loop(provider, kind, stream, name, **options):
    messages, called = [{"role": "user", "content": script(name)}], []
    for _ in range(MOST_TURNS):
        message = ask(provider, kind, stream, messages, tools=TOOLS, **options)
        messages.append(message)
        if not message.tool_calls:
            return messages, called
        for call in message.tool_calls:
            called.append(call.function.name)
            content, _ = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    raise AssertionError(f"the loop did not end: {called}")


@pytest.mark.parametrize("reasoning", REASONING)
@PROVIDERS
@STREAMED
@KINDS
def test_loop(reasoning, provider, stream, kind):
    messages, called = tool_loop(provider, kind, stream, "loop", **REASONING[reasoning])
    assert called == CALLED
    assert messages[-1].content == ANSWER


@pytest.mark.parametrize("name", ["error", "unknown"])
@PROVIDERS
@STREAMED
@KINDS
def test_tools_that_fail_or_do_not_exist(name, provider, stream, kind):
    messages, _ = tool_loop(provider, kind, stream, name)
    messages.append({"role": "user", "content": "Go on."})
    assert ask(provider, kind, stream, messages, tools=TOOLS).content == ANSWER


@pytest.mark.parametrize("thinks", [False, True], ids=["unset", "thinking"])
@PROVIDERS
@KINDS
def test_anthropic_messages(thinks, provider, kind):
    """What LiteLLM's proxy does with Claude Code's requests."""
    thinking = REASONING["thinking"] if thinks else {}
    messages, called = [{"role": "user", "content": script("loop")}], []

    async def run():
        while len(called) < MOST_TURNS:
            given = {**place(provider, kind), "messages": messages, "max_tokens": 2000, "tools": BLOCK_TOOLS}
            answer = await litellm.anthropic.messages.acreate(**given, **thinking)
            calls = [block for block in answer["content"] if block["type"] == "tool_use"]
            if not calls:
                return answer
            called.extend(call["name"] for call in calls)
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": run_tool(call["name"], call["input"])[0]}
                for call in calls
            ]
            messages.extend([{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}])
        raise AssertionError(f"the loop did not end: {called}")

    answer = asyncio.run(run())
    assert called == CALLED
    assert answer["content"][-1]["text"] == ANSWER


@STREAMED
@PROVIDERS
def test_a_real_model(stream, provider):
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    for _ in range(2):
        messages.append(ask(provider, "smollm2", stream, messages, max_tokens=16))
        messages.append({"role": "user", "content": "And twice that?"})
