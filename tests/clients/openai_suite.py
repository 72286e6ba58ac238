"""openai: chat completions, completions and responses, as its users call them."""

import asyncio

import openai
import pytest
from common import (
    COPY,
    FILL_IN,
    KEY,
    MODEL,
    OPENAI_URL,
    PERSON,
    PERSON_SCHEMA,
    SORT,
    SORT_ANSWER,
    SUM,
    SUM_ANSWER,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_RESULT,
    WEATHER_TOOL,
    num_aborted,
    run,
    user,
    wait_until_aborted,
)

from models import GetWeather, Person


@pytest.fixture(scope="module")
def client():
    with openai.OpenAI(base_url=OPENAI_URL, api_key=KEY) as opened:
        yield opened


def chat(client, text, **options):
    return client.chat.completions.create(model=MODEL, messages=[user(text)], temperature=0, **options)


def test_chat(client):
    answer = chat(client, SUM)
    assert answer.choices[0].message.content == SUM_ANSWER
    assert answer.choices[0].finish_reason == "stop"


def test_stream(client):
    chunks = list(chat(client, SUM, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SUM_ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stream_helper(client):
    with client.chat.completions.stream(model=MODEL, messages=[user(SUM)], temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == stream.get_final_completion().choices[0].message.content == SUM_ANSWER


def test_tools(client):
    messages = [user(WEATHER)]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER_TOOL], temperature=0)
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER_TOOL], temperature=0)
    assert second.choices[0].message.content == WEATHER_ANSWER


def test_pydantic_tools(client):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.chat.completions.parse(
        model=MODEL, messages=[user(WEATHER)], tools=[tool], tool_choice="required", temperature=0
    )
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")


def test_structured_output(client):
    parsed = client.chat.completions.parse(model=MODEL, messages=[user(FILL_IN)], response_format=Person, temperature=0)
    assert parsed.choices[0].message.parsed == Person(**PERSON)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True}}
    assert Person.model_validate_json(chat(client, FILL_IN, response_format=form).choices[0].message.content).age == 34


def test_usage(client):
    whole = chat(client, SUM).usage
    *_, last = chat(client, SUM, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == whole.completion_tokens > 0
    assert last.usage.total_tokens == whole.prompt_tokens + whole.completion_tokens


def test_logprobs(client):
    (choice,) = chat(client, SUM, logprobs=True, top_logprobs=2).choices
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt=["a b c", "d e f"], max_tokens=4, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_responses(client):
    response = client.responses.create(model=MODEL, input=SUM, temperature=0)
    assert response.output_text == SUM_ANSWER
    with client.responses.stream(model=MODEL, input=SUM, temperature=0) as stream:
        assert stream.get_final_response().output_text == SUM_ANSWER
    parsed = client.responses.parse(model=MODEL, input=FILL_IN, text_format=Person, temperature=0)
    assert parsed.output_parsed == Person(**PERSON)


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, SUM, top_p=7)
    assert refused.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=[user(SUM)])
    with pytest.raises(openai.AuthenticationError):
        chat(client.with_options(api_key="wrong"), SUM)


def test_async():
    async def ask():
        async with openai.AsyncOpenAI(base_url=OPENAI_URL, api_key=KEY) as client:
            questions = [(SUM, SUM_ANSWER), (SORT, SORT_ANSWER)] * 8
            answers = await asyncio.gather(*(chat(client, question) for question, _ in questions))
            assert [answer.choices[0].message.content for answer in answers] == [answer for _, answer in questions]
            text = ""
            async for chunk in await chat(client, SUM, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == SUM_ANSWER

    run(ask())


def test_cancellation(client):
    before = num_aborted()
    with chat(client, COPY, stream=True) as stream:
        next(stream)
    wait_until_aborted(before)
    before = num_aborted()
    impatient = client.with_options(timeout=0.2, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        chat(impatient, COPY)
    wait_until_aborted(before)
