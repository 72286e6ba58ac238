"""anthropic: messages, as its users call them."""

import asyncio

import anthropic
import pytest
from anthropic import beta_tool
from common import (
    CITY_SCHEMA,
    COPY,
    FILL_IN,
    KEY,
    MODEL,
    PERSON,
    PERSON_SCHEMA,
    SORT,
    SORT_ANSWER,
    SUM,
    SUM_ANSWER,
    URL,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_RESULT,
    num_aborted,
    run,
    user,
    wait_until_aborted,
)

from models import Person

TOOL = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": CITY_SCHEMA}


@pytest.fixture(scope="module")
def client():
    with anthropic.Anthropic(base_url=URL, api_key=KEY) as opened:
        yield opened


def options(text, **more):
    greedy = {"temperature": 0}  # not every model of Anthropic's takes one: newer clients have no parameter for it
    return {"model": MODEL, "max_tokens": 300, "messages": [user(text)], "extra_body": greedy} | more


def test_chat(client):
    message = client.messages.create(**options(SUM))
    assert (message.content[0].text, message.stop_reason) == (SUM_ANSWER, "end_turn")


def test_stream(client):
    with client.messages.stream(**options(SUM)) as stream:
        assert "".join(stream.text_stream) == SUM_ANSWER
        assert stream.get_final_message().stop_reason == "end_turn"
    kinds = [event.type for event in client.messages.create(**options(SUM, stream=True))]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_tools(client):
    first = client.messages.create(**options(WEATHER, tools=[TOOL]))
    (call,) = first.content
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER_RESULT}
    messages = [
        user(WEATHER),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**options(WEATHER, tools=[TOOL]) | {"messages": messages})
    assert second.content[0].text == WEATHER_ANSWER


def test_tool_runner(client):
    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        assert city == "Paris"
        return WEATHER_RESULT

    runner = client.beta.messages.tool_runner(**options(WEATHER, tools=[get_weather]))
    assert runner.until_done().content[0].text == WEATHER_ANSWER


def test_structured_output(client):
    form = {"format": {"type": "json_schema", "schema": PERSON_SCHEMA}}
    message = client.messages.create(**options(FILL_IN, output_config=form))
    assert Person.model_validate_json(message.content[0].text) == Person(**PERSON)
    assert client.messages.parse(**options(FILL_IN, output_format=Person)).parsed_output == Person(**PERSON)


def test_usage(client):
    whole = client.messages.create(**options(SUM)).usage
    with client.messages.stream(**options(SUM)) as stream:
        streamed = stream.get_final_message().usage
    assert streamed.output_tokens == whole.output_tokens > 0
    counted = client.messages.count_tokens(model=MODEL, messages=[user(SUM)]).input_tokens
    assert counted == whole.input_tokens + whole.cache_read_input_tokens


def test_cache_control(client):
    hint = {"type": "ephemeral"}
    system = [{"type": "text", "text": "You are the Penstock demo model.", "cache_control": hint}]
    assert client.messages.create(**options(SUM, system=system)).content[0].text == SUM_ANSWER


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**options(SUM, max_tokens=-1))
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**options(SUM, model="claude-9"))
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**options(SUM))


def test_async():
    async def ask():
        async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY) as client:
            questions = [(SUM, SUM_ANSWER), (SORT, SORT_ANSWER)] * 8
            answers = await asyncio.gather(*(client.messages.create(**options(question)) for question, _ in questions))
            assert [answer.content[0].text for answer in answers] == [answer for _, answer in questions]
            async with client.messages.stream(**options(SUM)) as stream:
                assert await stream.get_final_text() == SUM_ANSWER

    run(ask())


def test_cancellation(client):
    before = num_aborted()
    with client.messages.stream(**options(COPY, max_tokens=1000)) as stream:
        next(stream.text_stream)
    wait_until_aborted(before)
