"""GGUF files that hear: their answers equal those of `transformers` for the folder, offline and over HTTP."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidRequestError
from penstock.text.tokenizer import Tokenizer
from tests.server.running import RunningServer
from tests.support import omni, sounds
from tests.support.gguf_sounds import write_with_sounds
from tests.support.hearing import wav_of

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_memory": "4MiB", "threads": 1, "block_size": 8}
TEXT_ALONE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
TEXT_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% else %}{{ raise_exception('only text') }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


def sent(sound: sounds.Samples) -> dict[str, Any]:
    """A part of a body of OpenAI's."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav_of(sound)).decode(), "format": "wav"}}


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> sounds.Heard:
    return sounds.make("Qwen2-Audio", tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def model(heard: sounds.Heard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "text-F32.gguf"
    write_with_sounds(heard.folder, path, template=sounds.TEMPLATE)
    return path


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[RunningServer, openai.OpenAI]]:
    running = RunningServer("--model", str(model), "--kv-cache-memory", "8MiB", "--served-model-name", "heard")
    running.wait_until_listening()
    yield running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    running.stop()


def test_a_chat_about_sounds_is_answered_as_by_transformers(
    heard: sounds.Heard, model: Path, served: tuple[RunningServer, openai.OpenAI]
) -> None:
    server, client = served
    # what the WAV files hold, which have 16 bits
    samples = [(sound * 32768).round().clip(-32768, 32767).astype("float32") / 32768 for sound in heard.sounds]
    reference = replace(heard, sounds=samples)
    messages: Any = [{"role": "user", "content": [*map(sent, heard.sounds), {"type": "text", "text": "What?"}]}]
    counted = httpx.post(f"{server.url}/chat_tokenize", json={"messages": messages}, timeout=30).json()
    prompt = [token["id"] for token in counted["tokenize_response"]]
    answer = client.chat.completions.create(
        model="heard",
        messages=messages,
        temperature=0,
        max_tokens=40,
        extra_body={"ignore_eos": True},
    )
    tokenizer = Tokenizer.from_path(model)
    assert answer.choices[0].message.content == tokenizer.decode(reference.greedy(prompt, 40))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.audio_tokens == sum(image.count for image in heard.images)
    (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert listed["capabilities"] == ["completion", "audio"]


@pytest.mark.parametrize("template", [TEXT_ALONE, TEXT_PARTS])
def test_a_chat_template_that_does_not_know_sounds_gets_their_tokens_as_text(
    template: str, heard: sounds.Heard, tmp_path: Path
) -> None:
    write_with_sounds(heard.folder, tmp_path / "text.gguf", template=template)
    parts = [{"type": "audio", "audio": heard.sounds[0]}, {"type": "text", "text": "What?"}]
    with LLM(str(heard.folder), dtype="float32", **OPTIONS) as llm:
        expected = llm.chat_prompt([{"role": "user", "content": parts}])
    with LLM(str(tmp_path / "text.gguf"), **OPTIONS) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": parts}])
        assert llm.chat([{"role": "user", "content": "plain"}], GREEDY)
    assert (prompt.token_ids, prompt.images) == (expected.token_ids, expected.images)


def test_options_leave_encoders_out(tmp_path: Path) -> None:
    made, model = omni.make("Qwen2.5-Omni", tmp_path / "folder"), tmp_path / "text.gguf"
    write_with_sounds(made.folder, model, template=omni.TEMPLATE)
    first: Any = made.media[0]
    picture = {"type": "image", "image": omni.png_of(first)}
    sound = {"type": "audio", "audio": made.media[1]}
    for option, refused, taken in (("images", picture, sound), ("sounds", sound, picture)):
        with LLM(str(model), **(OPTIONS | {option: False})) as llm:
            assert llm.chat([{"role": "user", "content": [taken]}], GREEDY)
            with pytest.raises(InvalidRequestError, match=f"not {option}"):
                llm.chat([{"role": "user", "content": [refused]}], GREEDY)
