"""OpenAI's Agents SDK for Python, over chat completions and responses: loops of tools, whole and streamed."""

import asyncio

import agents
import openai
import pytest
from common import ANSWER, CALLED, HOW, KEY, KINDS, MODEL, SERVERS, STREAMED, add, lookup, script
from pydantic import BaseModel

agents.set_tracing_disabled(True)
DIALECTS = pytest.mark.parametrize(
    "dialect", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel], ids=["chat", "responses"]
)
STRICT = [agents.function_tool(tool) for tool in (lookup, add)]
LOOSE = [agents.function_tool(tool, strict_mode=False) for tool in (lookup, add)]


class Answer(BaseModel):
    text: str


def agent(dialect, kind, **options):
    client = openai.AsyncOpenAI(base_url=f"{SERVERS[kind]}/v1", api_key=KEY, max_retries=0)
    return agents.Agent(name="a", instructions="You help.", model=dialect(MODEL, openai_client=client), **options)


def finished(made, stream, question):
    """The result of a run, all of whose events have been read."""

    async def run():
        if not stream:
            return await agents.Runner.run(made, question)
        result = agents.Runner.run_streamed(made, question)
        async for _ in result.stream_events():
            pass
        return result

    return asyncio.run(run())


def called_by(result):
    return [item.raw_item.name for item in result.new_items if item.type == "tool_call_item"]


@pytest.mark.parametrize("effort", [None, "high"])
@DIALECTS
@STREAMED
@HOW
def test_loop(dialect, stream, kind, thinks, effort):
    given = effort if thinks else "none"
    reasoning = openai.types.Reasoning(effort=given, summary="auto" if effort else None) if given else None
    made = agent(dialect, kind, tools=LOOSE, model_settings=agents.ModelSettings(reasoning=reasoning))
    result = finished(made, stream, script("loop"))
    assert called_by(result) == CALLED
    assert result.final_output == ANSWER
    again = [*result.to_input_list(), {"role": "user", "content": "Again."}]
    assert finished(made, stream, again).final_output == ANSWER


@DIALECTS
@STREAMED
@KINDS
def test_strict_tools(dialect, stream, kind):
    """A grammar forces tokens that no script says, in harmony from the start on: it is asked for one turn."""
    once = {"tool_use_behavior": "stop_on_first_tool", "model_settings": agents.ModelSettings(tool_choice="required")}
    options = once if kind == "harmony" else {}
    result = finished(agent(dialect, kind, tools=STRICT, **options), stream, script("loop"))
    assert called_by(result)
    assert kind == "harmony" or result.final_output == ANSWER


@DIALECTS
@STREAMED
@KINDS
def test_a_tool_that_fails(dialect, stream, kind):
    assert finished(agent(dialect, kind, tools=LOOSE), stream, script("error")).final_output == ANSWER


@DIALECTS
@STREAMED
@KINDS
def test_a_form(dialect, stream, kind):
    made = agent(dialect, kind, output_type=Answer)
    assert isinstance(finished(made, stream, script("plain")).final_output, Answer)


@KINDS
def test_responses_by_their_ids(kind):
    made = agent(agents.OpenAIResponsesModel, kind, tools=LOOSE)
    result = asyncio.run(agents.Runner.run(made, script("loop"), auto_previous_response_id=True))
    assert result.final_output == ANSWER


@DIALECTS
@STREAMED
def test_a_real_model(dialect, stream):
    made = agent(dialect, "smollm2", model_settings=agents.ModelSettings(temperature=0))
    assert finished(made, stream, "How many days are there in a week?").final_output
