"""huggingface_hub: text generation as TGI has it, and chats, as its users call them."""

import asyncio
import json

import pytest
from common import (
    COPY,
    FILL_IN,
    KEY,
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
    WEATHER_TOOL,
    num_aborted,
    run,
    user,
    wait_until_aborted,
)
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

PROMPT = f"<|im_start|>user\n{SUM}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def client():
    with InferenceClient(URL, token=KEY) as opened:
        yield opened


def chat(client, text, **options):
    return client.chat_completion([user(text)], temperature=0.0, max_tokens=300, **options)


def test_chat(client):
    assert chat(client, SUM).choices[0].message.content == SUM_ANSWER
    same = client.chat.completions.create(messages=[user(SUM)], model="tgi", temperature=0.0)
    assert same.choices[0].message.content == SUM_ANSWER


def test_stream(client):
    chunks = chat(client, SUM, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SUM_ANSWER


def test_text_generation(client):
    whole = client.text_generation(PROMPT, max_new_tokens=20, details=True)
    assert whole.generated_text == SUM_ANSWER
    assert whole.details.finish_reason == "eos_token"
    pieces = list(client.text_generation(PROMPT, max_new_tokens=20, details=True, stream=True))
    assert pieces[-1].generated_text == SUM_ANSWER
    assert pieces[-1].details.generated_tokens == whole.details.generated_tokens
    grammar = {"type": "json", "value": PERSON_SCHEMA}
    fill_in = PROMPT.replace(SUM, FILL_IN)
    assert json.loads(client.text_generation(fill_in, max_new_tokens=200, grammar=grammar)) == PERSON


def test_tools(client):
    messages = [user(WEATHER)]
    options = {"tools": [WEATHER_TOOL], "temperature": 0.0, "max_tokens": 100}
    first = client.chat_completion(messages, tool_choice="auto", **options).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    asked = {"id": call.id, "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT},
    ]
    assert client.chat_completion(messages, **options).choices[0].message.content == WEATHER_ANSWER


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA}},
        {"type": "json_object", "value": PERSON_SCHEMA},
        {"type": "json", "value": PERSON_SCHEMA},
    ],
    ids=["json_schema", "json_object", "json"],
)
def test_structured_output(client, form):
    assert json.loads(chat(client, FILL_IN, response_format=form).choices[0].message.content) == PERSON


def test_usage(client):
    whole = chat(client, SUM).usage
    *_, last = chat(client, SUM, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == whole.completion_tokens > 0


def test_information():
    client = InferenceClient(URL, token=KEY, provider="hf-inference")  # else the client has no such methods
    assert client.get_endpoint_info()["model_pipeline_tag"] == "text-generation"
    assert client.health_check()


def test_errors(client):
    with pytest.raises(ValidationError, match="temperature"):
        client.text_generation(PROMPT, temperature=-1.0)
    with pytest.raises(HfHubHTTPError, match="top_p"):
        chat(client, SUM, top_p=7.0)
    with pytest.raises(HfHubHTTPError, match="401"):
        chat(InferenceClient(URL, token="wrong"), SUM)


def test_async():
    async def ask():
        async with AsyncInferenceClient(URL, token=KEY) as client:
            questions = [(SUM, SUM_ANSWER), (SORT, SORT_ANSWER)] * 8
            answers = await asyncio.gather(*(chat(client, question) for question, _ in questions))
            assert [answer.choices[0].message.content for answer in answers] == [answer for _, answer in questions]
            pieces = await client.text_generation(PROMPT, max_new_tokens=20, stream=True)
            assert "".join([piece async for piece in pieces]).startswith(SUM_ANSWER)

    run(ask())


def test_cancellation(client):
    before = num_aborted()
    stream = chat(client, COPY, stream=True)
    next(iter(stream))
    stream.close()
    wait_until_aborted(before)
