"""instructor: its modes over chat completions, responses and messages."""

from collections.abc import Iterable

import anthropic
import instructor
import openai
import pytest
from common import (
    COPY,
    FILL_IN,
    KEY,
    MODEL,
    OPENAI_URL,
    PERSON,
    SUM,
    URL,
    WEATHER,
    leave,
    run,
    user,
)
from instructor import Mode
from instructor.core import InstructorRetryException
from pydantic import BaseModel, create_model

from models import GetWeather, Person

# The demo model was trained to call it by this name; instructor takes the class's.
get_weather = create_model("get_weather", __doc__=GetWeather.__doc__, city=(str, ...))


class Copied(BaseModel):
    text: str


def over_openai(mode):
    return instructor.from_openai(openai.OpenAI(base_url=OPENAI_URL, api_key=KEY), mode=mode, model=MODEL)


def over_openai_async(mode):
    return instructor.from_openai(openai.AsyncOpenAI(base_url=OPENAI_URL, api_key=KEY), mode=mode, model=MODEL)


def over_anthropic(mode):
    return instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key=KEY), mode=mode, model=MODEL)


def asked(text, **options):
    return {"messages": [user(text)], "max_retries": 0, "max_tokens": 300, "temperature": 0, **options}


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.PARALLEL_TOOLS])
def test_tools(mode):
    several = mode is Mode.PARALLEL_TOOLS
    form = Iterable[get_weather] if several else get_weather
    made = over_openai(mode).create(response_model=form, **asked(WEATHER))
    assert [one.city for one in (made if several else [made])] == ["Paris"]


def test_responses():
    made = over_openai(Mode.RESPONSES_TOOLS).create(response_model=GetWeather, **asked(WEATHER))
    assert made.city == "Paris"


def test_anthropics_tools():
    made = over_anthropic(Mode.ANTHROPIC_TOOLS).create(response_model=GetWeather, **asked(WEATHER))
    assert made.city == "Paris"


def test_structured_output():
    made = over_openai(Mode.JSON_SCHEMA).create(response_model=Person, **asked(FILL_IN))
    assert made.model_dump() == PERSON


def test_json_mode():
    made = over_openai(Mode.JSON).create(response_model=Person, **asked(FILL_IN))
    assert isinstance(made, Person), "the schema is told in the prompt alone"


def test_stream():
    stream = over_openai(Mode.JSON_SCHEMA).create_partial(response_model=Person, **asked(FILL_IN))
    *parts, last = stream
    assert parts
    assert last.model_dump() == PERSON
    stream = over_openai(Mode.TOOLS).create_partial(response_model=GetWeather, **asked(WEATHER))
    assert [part.city for part in stream][-1]


def test_usage():
    client = over_openai(Mode.TOOLS)
    made, completion = client.create_with_completion(response_model=GetWeather, **asked(WEATHER))
    assert made.city == "Paris"
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


def test_no_model():
    answer = over_openai(Mode.TOOLS).create(response_model=None, **asked(SUM))
    assert answer.choices[0].message.content == "37 + 58 = 95"


def test_errors():
    with pytest.raises(InstructorRetryException, match="top_p"):
        over_openai(Mode.TOOLS).create(response_model=GetWeather, **asked(WEATHER, top_p=7))
    with pytest.raises(InstructorRetryException, match="max_tokens"):
        over_anthropic(Mode.ANTHROPIC_TOOLS).create(response_model=GetWeather, **asked(WEATHER, max_tokens=-1))


def test_async():
    async def ask():
        client = over_openai_async(Mode.TOOLS)
        made = [await client.create(response_model=GetWeather, **asked(WEATHER)) for _ in range(8)]
        assert {one.city for one in made} == {"Paris"}

    run(ask())


def test_cancellation():
    async def stream():
        client = over_openai_async(Mode.JSON_SCHEMA)
        async for part in client.create_partial(response_model=Copied, **asked(COPY, max_tokens=1000)):
            yield part

    leave(stream)
