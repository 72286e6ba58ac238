"""LiteLLM: its providers openai, hosted_vllm, text-completion-openai, anthropic and huggingface, without a proxy."""

import asyncio
import json

import litellm
import pytest
from common import (
    COPY,
    FILL_IN,
    KEY,
    MODEL,
    OPENAI_URL,
    PERSON,
    SORT,
    SORT_ANSWER,
    SUM,
    SUM_ANSWER,
    URL,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_RESULT,
    WEATHER_TOOL,
    leave,
    run,
    user,
)

from models import Person

OPENAI = {"model": f"openai/{MODEL}", "api_base": OPENAI_URL}
VLLM = {"model": f"hosted_vllm/{MODEL}", "api_base": OPENAI_URL}
OPENROUTER = {"model": f"openrouter/{MODEL}", "api_base": OPENAI_URL}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL}
ALL = pytest.mark.parametrize("provider", [OPENAI, VLLM, ANTHROPIC], ids=["openai", "hosted_vllm", "anthropic"])


def options(provider, text, **more):
    return {"api_key": KEY, "temperature": 0, "max_tokens": 300, "messages": [user(text)], **provider, **more}


def ask(provider, text, **more):
    return litellm.completion(**options(provider, text, **more))


@ALL
def test_chat(provider):
    answer = ask(provider, SUM)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SUM_ANSWER, "stop")


@ALL
def test_stream(provider):
    chunks = list(ask(provider, SUM, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SUM_ANSWER
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == ask(provider, SUM).usage.completion_tokens


@ALL
def test_tools(provider):
    first = ask(provider, WEATHER, tools=[WEATHER_TOOL]).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages = [user(WEATHER), first, {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}]
    second = litellm.completion(**options(provider, "") | {"messages": messages, "tools": [WEATHER_TOOL]})
    assert second.choices[0].message.content == WEATHER_ANSWER


@ALL
def test_forced_tools(provider):
    answer = ask(provider, WEATHER, tools=[WEATHER_TOOL], tool_choice="required", parallel_tool_calls=False)
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments).keys() == {"city"}


@ALL
def test_structured_output(provider):
    person = Person.model_validate_json(ask(provider, FILL_IN, response_format=Person).choices[0].message.content)
    # LiteLLM makes a tool of the form for Anthropic's models that it does not know; the demo model does not either.
    assert person == Person(**PERSON) or provider is ANTHROPIC


@ALL
def test_usage(provider):
    usage = ask(provider, SUM).usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0


@ALL
def test_hints_of_what_to_cache(provider):
    hint = {"type": "ephemeral"}
    system = {"role": "system", "content": [{"type": "text", "text": "You can add.", "cache_control": hint}]}
    for message in (system, {"role": "system", "content": "You can add.", "cache_control": hint}):
        answer = litellm.completion(**options(provider, "") | {"messages": [message, user(SUM)]})
        assert answer.choices[0].message.content == SUM_ANSWER
    answer = ask(provider, WEATHER, tools=[WEATHER_TOOL | {"cache_control": hint}])
    assert answer.choices[0].message.tool_calls


def test_openrouter():
    hint = {"type": "ephemeral"}
    message = user(SUM) | {"content": [{"type": "text", "text": SUM, "cache_control": hint}]}
    answer = litellm.completion(**options(OPENROUTER, "") | {"messages": [message]})
    assert answer.choices[0].message.content == SUM_ANSWER


def test_completions():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=OPENAI_URL, api_key=KEY, prompt="a b c", max_tokens=4
    )
    assert answer.choices[0].finish_reason == "length"


def test_responses():
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=OPENAI_URL, api_key=KEY, input=SUM, temperature=0, max_output_tokens=50
    )
    assert answer.output[0].content[0].text == SUM_ANSWER


def test_anthropics_messages():
    options = {"api_base": URL, "api_key": KEY, "max_tokens": 50, "temperature": 0}
    answer = run(litellm.anthropic.messages.acreate(model=f"anthropic/{MODEL}", messages=[user(SUM)], **options))
    assert answer["content"][0]["text"] == SUM_ANSWER


@ALL
def test_errors(provider):
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        ask(provider, SUM, top_p=7, num_retries=0)
    with pytest.raises(litellm.AuthenticationError):
        ask(provider, SUM, api_key="wrong")
    name = provider["model"].split("/")[0]
    with pytest.raises(litellm.NotFoundError):
        ask(provider, SUM, model=f"{name}/gpt-9")
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(provider, SUM * 1000)


@ALL
def test_async(provider):
    async def ask_all():
        questions = [(SUM, SUM_ANSWER), (SORT, SORT_ANSWER)] * 8
        calls = (litellm.acompletion(**options(provider, question)) for question, _ in questions)
        answers = await asyncio.gather(*calls)
        assert [answer.choices[0].message.content for answer in answers] == [answer for _, answer in questions]
        text = ""
        async for chunk in await litellm.acompletion(**options(provider, SUM, stream=True)):
            text += chunk.choices[0].delta.content or ""
        assert text == SUM_ANSWER

    run(ask_all())


@ALL
def test_cancellation(provider):
    async def stream():
        async for chunk in await litellm.acompletion(**options(provider, COPY, stream=True, max_tokens=1000)):
            yield chunk

    leave(stream)
