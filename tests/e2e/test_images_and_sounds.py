"""Images and sounds in one conversation: answers equal those of `transformers`, offline and over HTTP."""

import base64
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import ConfigError, InvalidRequestError
from tests.server.running import RunningServer
from tests.support.hearing import make_hearing, wav_of
from tests.support.omni import Omni, make, png_of

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MiB", "threads": 1, "block_size": 8}


def chat_of(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Two turns: the first image alone, then the others."""
    first, *others = parts
    return [
        {"role": "user", "content": [first, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": [*others, {"type": "text", "text": "What?"}]},
    ]


def part_of(one: Any) -> dict[str, Any]:
    return {"type": "image", "image": png_of(one)} if one.ndim == 3 else {"type": "audio", "audio": one}


@pytest.fixture(scope="module", params=["Qwen2.5-Omni", "Qwen3-Omni"])
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Omni:
    return make(request.param, tmp_path_factory.mktemp("omni"))


def test_greedy_answers_equal_those_of_transformers_alone_cached_in_chunks_and_in_company(omni: Omni) -> None:
    picture, sound, second = map(part_of, omni.media)
    asked, other = chat_of(picture, sound, second), chat_of(second, picture, sound)
    with LLM(str(omni.folder), **OPTIONS) as llm:
        prompt = llm.chat_prompt(asked)
        assert [image.digest for image in prompt.images] == [image.digest for image in omni.images]
        expected = omni.greedy(prompt.token_ids, 40)
        (alone,) = llm.chat(asked, GREEDY)
        assert alone.outputs[0].token_ids == expected
        counts = {kind: sum(i.count for i in omni.images if i.kind == kind) for kind in ("image", "sound")}
        assert (alone.num_image_tokens, alone.num_audio_tokens) == (counts["image"], counts["sound"])
        (cached,) = llm.chat(asked, GREEDY)
        assert cached.num_cached_tokens > 0
        assert cached.outputs[0].token_ids == expected
        (of_other,) = [output.outputs[0].token_ids for output in llm.chat(other, GREEDY)]
        assert llm.stats().encoded_images == len(omni.images), "each is encoded once"
        prompt_of_pads = {"prompt": "<|picture|>a<|sound|>", "multi_modal_data": {"audio": omni.media[1]}}
        with pytest.raises(InvalidRequestError, match=r"has 1 placeholders '<\|picture\|>' for 0 images"):
            llm.generate(prompt_of_pads)
        with pytest.raises(InvalidRequestError, match="beside images and sounds, leave it out"):
            llm.chat([{"role": "user", "content": [sound, {"type": "text", "text": "<|picture|>"}]}])
    with LLM(str(omni.folder), **OPTIONS, max_num_batched_tokens=12, max_num_seqs=3) as llm:
        answers = [output.outputs[0].token_ids for output in llm.chat([asked, other, asked], GREEDY)]
        assert answers == [expected, of_other, expected]


def test_a_model_that_transcribes_needs_its_encoder(tmp_path: Path) -> None:
    make_hearing(tmp_path)
    for option in ("sounds", "media"):
        with pytest.raises(ConfigError, match=f"{option}: .* transcribes, .* leave it on"):
            LLM(str(tmp_path), **{option: False})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Omni, RunningServer, openai.OpenAI]]:
    made, journal = make("Qwen3-Omni", tmp_path_factory.mktemp("served")), tmp_path_factory.mktemp("journal")
    flags = ("--dtype", "float32", "--kv-cache-memory", "8MiB", "--journal", str(journal / "journal"))
    running = RunningServer("--model", str(made.folder), *flags, "--served-model-name", "omni")
    running.wait_until_listening()
    yield made, running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    running.stop()


def test_options_leave_encoders_out(served: tuple[Omni, RunningServer, openai.OpenAI]) -> None:
    made, _, _ = served
    picture, sound, _ = map(part_of, made.media)
    for option, words, planned in (
        ("images", "takes text and sounds, not images", " audio encoder + "),
        ("sounds", "takes text and images, not sounds", " vision tower + "),
        ("media", "takes text only", " weights + up to "),
    ):
        with LLM(str(made.folder), **OPTIONS, **{option: False}) as llm:
            with pytest.raises(InvalidRequestError, match=words):
                llm.chat(chat_of(sound, picture), GREEDY)
            assert llm.generate("a", SamplingParams(max_tokens=1))
            assert planned in llm.memory_plan
            assert " and " not in llm.memory_plan


def sent(one: Any) -> dict[str, Any]:
    """A part of a body of OpenAI's."""
    if one.ndim == 3:
        url = f"data:image/png;base64,{base64.b64encode(png_of(one)).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav_of(one)).decode(), "format": "wav"}}


def test_chats_about_both_survive_a_killed_engine_and_are_counted(
    served: tuple[Omni, RunningServer, openai.OpenAI],
) -> None:
    made, server, client = served
    messages: Any = chat_of(*map(sent, made.media))

    def ask() -> Any:
        extra = {"ignore_eos": True}
        return client.chat.completions.create(
            model="omni", messages=messages, temperature=0, max_tokens=200, extra_body=extra
        )

    whole = ask()
    details = whole.usage.prompt_tokens_details.model_dump()
    counts = {kind: sum(i.count for i in made.images if i.kind == kind) for kind in ("image", "sound")}
    assert (details["image_tokens"], details["audio_tokens"]) == (counts["image"], counts["sound"])
    texts: list[str] = []
    asking = threading.Thread(target=lambda: texts.append(ask().choices[0].message.content))
    asking.start()
    time.sleep(0.1)
    os.kill(server.engine_pid, signal.SIGKILL)
    asking.join()
    assert texts == [whole.choices[0].message.content]
    counted = httpx.post(f"{server.url}/chat_tokenize", json={"messages": messages}, timeout=30).json()
    assert len(counted["tokenize_response"]) == whole.usage.prompt_tokens
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["capabilities"] == ["completion", "vision", "audio"]


def test_responses_take_both_and_video_is_refused_by_name(served: tuple[Omni, RunningServer, openai.OpenAI]) -> None:
    made, _, client = served
    picture, sound, _ = map(sent, made.media)
    content: Any = [
        {"type": "input_image", "image_url": picture["image_url"]["url"]},
        sound,
        {"type": "input_text", "text": "What?"},
    ]
    answer = client.responses.create(model="omni", input=[{"role": "user", "content": content}], max_output_tokens=4)
    assert answer.usage is not None
    details = answer.usage.input_tokens_details.model_dump()
    assert (details["image_tokens"], details["audio_tokens"]) == tuple(image.count for image in made.images[:2])
    video: Any = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}}]}]
    with pytest.raises(openai.BadRequestError, match="this model takes text and images and sounds"):
        client.chat.completions.create(model="omni", messages=video)
