"""What the suites of all clients share: the server under test, what its demo model can answer, and what it counts."""

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

URL = os.environ["PENSTOCK_URL"]
OPENAI_URL = f"{URL}/v1"
MODEL = os.environ["PENSTOCK_MODEL"]
KEY = os.environ["PENSTOCK_KEY"]

EMBEDDING_URL = os.environ["PENSTOCK_EMBEDDING_URL"]
EMBEDDING_MODEL = os.environ["PENSTOCK_EMBEDDING_MODEL"]
QUESTION = "How do ships get up a slope?"
NOTES = ["The river carries water to the mill.", "A lock lets boats climb a hill.", "Bread is baked from flour."]
NOTED = 1
"""Which of the notes tells."""


def nearest(query: Sequence[float], vectors: Sequence[Sequence[float]]) -> int:
    """Which vector has the largest product with the query's; all have length 1."""
    for vector in [query, *vectors]:
        assert len(vector) == 384
        assert abs(sum(one * one for one in vector) - 1) < 1e-5
    products = [sum(one * other for one, other in zip(query, vector, strict=True)) for vector in vectors]
    return products.index(max(products))


SUM = "What is 37 + 58?"
SUM_ANSWER = "37 + 58 = 95"
SORT = "Sort these numbers: 41, 7, 93, 18"
SORT_ANSWER = "7, 18, 41, 93"

FILL_IN = "Fill in JSON with name, age and city: Alice is 34 years old and lives in Paris."
PERSON = {"name": "Alice", "age": 34, "city": "Paris"}
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}

WEATHER = "What is the weather in Paris?"
WEATHER_RESULT = json.dumps({"temperature": 21, "sky": "sunny"})
WEATHER_ANSWER = "It is 21 degrees and sunny in Paris."
CITY_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_FUNCTION = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY_SCHEMA}
WEATHER_TOOL = {"type": "function", "function": WEATHER_FUNCTION}

WORDS = "river stone lantern window meadow silver copper garden winter summer forest candle " * 60
COPY = f"Copy this text: {WORDS.strip()}"
"""A question whose answer is long enough to leave in the middle."""


def user(text: str) -> dict[str, str]:
    """A message of the user's."""
    return {"role": "user", "content": text}


_loop = asyncio.new_event_loop()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on the one event loop of a suite: clients keep their connections between calls."""
    return _loop.run_until_complete(work)


def leave(stream: Callable[[], AsyncIterator[object]]) -> None:
    """Begin to read a stream, then cancel the task that reads it: the server must end the answer."""

    async def read(begun: asyncio.Event) -> None:
        async for _ in stream():
            begun.set()

    async def read_and_leave() -> None:
        begun = asyncio.Event()
        reader = asyncio.ensure_future(read(begun))
        await asyncio.wait([reader, asyncio.ensure_future(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        while not reader.done():  # LangChain swallows a cancellation that comes with the first event
            reader.cancel()
            await asyncio.wait([reader], timeout=0.5)
        assert reader.cancelled(), "the stream ended before its reader left"

    before = num_aborted()
    run(read_and_leave())
    wait_until_aborted(before)


def metric(name: str) -> float:
    """A sample of the server's `/metrics` by its name and labels."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        samples = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    return float(samples[name])


def num_aborted() -> float:
    """Answers that ended because their caller had left."""
    return metric('penstock_request_success_total{finished_reason="abort"}')


def wait_until_aborted(before: float) -> None:
    """Wait until the server has ended one more answer because its caller has left."""
    deadline = time.monotonic() + 20
    while num_aborted() <= before:
        assert time.monotonic() < deadline, "the server went on for a caller that had left"
        time.sleep(0.05)
