"""Pydantic AI over chat completions, responses and Anthropic's messages: loops of tools, with thinking, and forms."""

import asyncio

import pytest
from common import ANSWER, CALLED, KEY, KINDS, MODEL, QUIET, SERVERS, STREAMED, add, lookup, script
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, Tool
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIChatModelSettings,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

DIALECTS = pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
THINKING = {
    "chat": OpenAIChatModelSettings(openai_reasoning_effort="high"),
    "responses": OpenAIResponsesModelSettings(openai_reasoning_effort="high", openai_reasoning_summary="auto"),
    "anthropic": AnthropicModelSettings(anthropic_thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000),
}


def model(dialect, kind):
    if dialect == "anthropic":
        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=SERVERS[kind], api_key=KEY))
    provider = OpenAIProvider(base_url=f"{SERVERS[kind]}/v1", api_key=KEY)
    return (OpenAIChatModel if dialect == "chat" else OpenAIResponsesModel)(MODEL, provider=provider)


def look_up(query: str) -> str:
    """Look something up."""
    try:
        return lookup(query)
    except LookupError as error:
        raise ModelRetry(str(error)) from error


TOOLS = [Tool(look_up, name="lookup", max_retries=3, strict=False), Tool(add, strict=False)]
STRICT = [Tool(look_up, name="lookup", max_retries=9, strict=True), Tool(add, strict=True)]


def finished(agent, stream, question, **options):
    """The result of a run."""

    async def run():
        if not stream:
            return await agent.run(question, **options)
        async with agent.run_stream_events(question, **options) as events:
            return [event async for event in events][-1].result

    return asyncio.run(run())


def called_by(result):
    return [
        part.tool_name for message in result.all_messages() for part in message.parts if isinstance(part, ToolCallPart)
    ]


@pytest.mark.parametrize("thinks", [False, True], ids=["unset", "thinking"])
@DIALECTS
@STREAMED
@KINDS
def test_loop(thinks, dialect, stream, kind):
    agent = Agent(model(dialect, kind), tools=TOOLS, model_settings=THINKING[dialect] if thinks else None)
    result = finished(agent, stream, script("loop"))
    assert called_by(result) == CALLED
    assert result.output == ANSWER
    assert finished(agent, stream, "Again.", message_history=result.all_messages()).output == ANSWER


@DIALECTS
@STREAMED
@pytest.mark.parametrize("kind", QUIET)  # in harmony a grammar forces tokens that no script says, from the start on
def test_strict_tools(dialect, stream, kind):
    result = finished(Agent(model(dialect, kind), tools=STRICT), stream, script("loop"))
    assert called_by(result)
    assert result.output == ANSWER


@pytest.mark.parametrize("name", ["error", "unknown"])
@DIALECTS
@STREAMED
@KINDS
def test_tools_that_fail_or_do_not_exist(name, dialect, stream, kind):
    finished(Agent(model(dialect, kind), tools=TOOLS), stream, script(name))


class Answer(BaseModel):
    text: str


@DIALECTS
@STREAMED
@KINDS
def test_a_form(dialect, stream, kind):
    """By a tool that must be called."""
    result = finished(Agent(model(dialect, kind), output_type=Answer), stream, script("loop"))
    assert isinstance(result.output, Answer)


@DIALECTS
@STREAMED
def test_a_real_model(dialect, stream):
    assert finished(
        Agent(model(dialect, "smollm2"), model_settings={"max_tokens": 16}), stream, "What is 2 + 2?"
    ).output
