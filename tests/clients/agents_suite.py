"""OpenAI's agents SDK, over chat completions and responses: it sends tools and a form of the last answer at once."""

import json
from typing import Annotated, Literal

import agents
import openai
import pytest
from common import (
    FILL_IN,
    KEY,
    MODEL,
    OPENAI_URL,
    PERSON,
    SUM,
    SUM_ANSWER,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_RESULT,
    run,
)
from pydantic import BaseModel, Field

from models import Person

agents.set_tracing_disabled(True)
CLIENT = openai.AsyncOpenAI(base_url=OPENAI_URL, api_key=KEY)
ALL = pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
CALLED = agents.ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
"""The first answer is a call; the SDK leaves the choice to the model from then on."""


class Weather(BaseModel):
    """Left open, a small model may never end."""

    degrees: Annotated[int, Field(ge=0, le=40)]
    sky: Literal["sunny", "rainy"]


@agents.function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return WEATHER_RESULT


def agent(kind, **options):
    options = {"model_settings": agents.ModelSettings(temperature=0)} | options
    return agents.Agent(name="a", model=kind(MODEL, openai_client=CLIENT), **options)


def calls_of(result):
    return [json.loads(item.raw_item.arguments) for item in result.new_items if item.type == "tool_call_item"]


@ALL
def test_chat(kind):
    assert run(agents.Runner.run(agent(kind), SUM)).final_output == SUM_ANSWER


@ALL
def test_tools(kind):
    result = run(agents.Runner.run(agent(kind, tools=[get_weather], model_settings=CALLED), WEATHER))
    assert list(calls_of(result)[0]) == ["city"]
    assert result.final_output == WEATHER_ANSWER


@ALL
def test_stream(kind):
    async def read():
        result = agents.Runner.run_streamed(agent(kind, tools=[get_weather], model_settings=CALLED), WEATHER)
        kinds = {event.type async for event in result.stream_events()}
        assert "raw_response_event" in kinds
        return result.final_output

    assert run(read()) == WEATHER_ANSWER


@ALL
def test_tools_beside_a_form(kind):
    either = agent(kind, tools=[get_weather], output_type=Person, tool_use_behavior="stop_on_first_tool")
    assert run(agents.Runner.run(either, FILL_IN)).final_output == Person(**PERSON)
    result = run(agents.Runner.run(either, WEATHER))
    assert result.final_output == WEATHER_RESULT
    assert len(calls_of(result)) == 1


@ALL
def test_a_form(kind):
    assert isinstance(run(agents.Runner.run(agent(kind, output_type=Weather), WEATHER)).final_output, Weather)
