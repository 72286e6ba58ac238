"""A model that names the colour of a picture, over HTTP: in one batch, from the cache, after a crash.

Run by `scripts/nightly`, or with TEST_COLOURS=1.
"""

import base64
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from PIL import Image

from tests.server.running import RunningServer, running_server
from tools.colour_model import COLOURS, PROMPT, picture, write_colour_model

pytestmark = pytest.mark.skipif(
    "TEST_COLOURS" not in os.environ, reason="making the model takes half a minute: of the nightly tests"
)
DOCS = Path(__file__).parents[2] / "docs" / "images" / "green.png"
BEFORE, AFTER = PROMPT.split("<image>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_colour_model(tmp_path_factory.mktemp("colours"))
    with running_server(
        "--model", str(folder), "--served-model-name", "colours", "--threads", "1", "--max-model-len", "1024"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as opened:
        yield opened


def photo(colour: str, number: int = 0, format: str = "PNG") -> str:
    """Base64 of a picture of a colour; each number has a shade of its own."""
    seen = picture(colour, np.random.default_rng(100 + number))
    buffer = io.BytesIO()
    Image.fromarray(seen).save(buffer, format, **({"quality": 95} if format == "JPEG" else {}))
    return base64.b64encode(buffer.getvalue()).decode()


def named(client: openai.OpenAI, colour: str, number: int = 0) -> tuple[str, Any]:
    """What the model calls a picture, and the usage."""
    return answer_about(client, photo(colour, number))


def answer_about(client: openai.OpenAI, encoded: str) -> tuple[str, Any]:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    parts: list[Any] = [{"type": "text", "text": BEFORE}, image, {"type": "text", "text": AFTER}]
    answer = client.chat.completions.create(
        model="colours", temperature=0, max_tokens=1, messages=[{"role": "user", "content": parts}]
    )
    return (answer.choices[0].message.content or "").strip(), answer.usage


def test_pictures_with_equal_placeholders_are_told_apart_in_one_batch(client: openai.OpenAI) -> None:
    asked = [(colour, number) for number in range(2) for colour in COLOURS]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda one: named(client, *one)[0], asked))
    assert answers == [colour for colour, _ in asked]


def test_the_picture_of_the_docs_is_green(client: openai.OpenAI) -> None:
    picture = base64.b64encode(DOCS.read_bytes()).decode()
    assert answer_about(client, picture)[0] == "green"


def test_they_are_told_apart_from_the_cache_and_after_a_crash(client: openai.OpenAI, server: RunningServer) -> None:
    first = {colour: named(client, colour, 5) for colour in ("red", "blue")}
    again = {colour: named(client, colour, 5) for colour in ("red", "blue")}
    assert [answer for answer, _ in (*first.values(), *again.values())] == ["red", "blue"] * 2
    os.kill(server.engine_pid, signal.SIGKILL)
    assert [named(client, colour, 5)[0] for colour in ("blue", "red")] == ["blue", "red"]
    assert again["red"][1].prompt_tokens_details.model_dump()["image_tokens"] == 1


def test_anthropics_client_is_answered_likewise(server: RunningServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        for colour in ("green", "yellow"):
            source = {"type": "base64", "media_type": "image/jpeg", "data": photo(colour, format="JPEG")}
            parts: list[Any] = [{"type": "image", "source": source}, {"type": "text", "text": AFTER}]
            turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": BEFORE}, *parts]}]
            answer = client.messages.create(
                model="colours", max_tokens=1, messages=turns, extra_body={"temperature": 0}
            )
            assert answer.content[0].type == "text"
            assert answer.content[0].text.strip() == colour


def test_a_hostile_picture_beside_them_is_refused_and_they_are_named(client: openai.OpenAI, tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{photo('red')[:200]}"}}
    with pytest.raises(openai.BadRequestError, match="damaged or incomplete"):
        client.chat.completions.create(model="colours", messages=[{"role": "user", "content": [image]}])  # type: ignore
    assert named(client, "red")[0] == "red"
