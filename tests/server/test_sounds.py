"""Sounds in chats over HTTP, by OpenAI's client."""

import base64
import json
import os
import signal
import threading
import time

import httpx
import openai
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidRequestError
from penstock.parsers.conversation import HERMES, ChatFormat
from penstock.server.image_parts import not_supported
from tests.server.running import RunningServer
from tests.support import vision
from tests.support.hearing import a_sound, wav_of
from tests.support.sounds import TEMPLATE, make
from tests.support.tokenizers_for_tests import byte_level_bpe

LONG, SHORT = wav_of(a_sound(1.8)), wav_of(a_sound(0.5, 3))


def encoded(content):
    return base64.b64encode(content).decode()


def sound(content):
    return {"type": "input_audio", "input_audio": {"data": encoded(content), "format": "wav"}}


def user(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("Qwen2-Audio", tmp_path_factory.mktemp("heard")).folder


@pytest.fixture(scope="module")
def expected(folder):
    """Answers of `LLM.chat`."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with LLM(str(folder), dtype="float32", kv_cache_memory="8MiB") as llm:
        return [output.outputs[0].text for output in llm.chat([user(sound(LONG), sound(SHORT))], params)]


@pytest.fixture(scope="module")
def sound_server(folder, tmp_path_factory):
    journal = tmp_path_factory.mktemp("journal") / "journal"
    flags = ("--model", str(folder), "--dtype", "float32", "--kv-cache-memory", "8MiB", "--journal", str(journal))
    running = RunningServer(*flags, "--served-model-name", "heard", "--max-sounds", "2").wait_until_listening()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(sound_server):
    return openai.OpenAI(base_url=f"{sound_server.url}/v1", api_key="none", max_retries=0)


def ask(client, *parts, **options):
    options = {"temperature": 0, "max_tokens": 200, "extra_body": {"ignore_eos": True}} | options
    return client.chat.completions.create(model="heard", messages=user(*parts), **options)


def test_a_chat_about_sounds_is_answered_as_in_python(sound_server, client, expected):
    answer = ask(client, sound(LONG), sound(SHORT))
    assert answer.choices[0].message.content == expected[0]
    assert answer.usage.prompt_tokens_details.audio_tokens == 45 + 12
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded(SHORT)}"}}
    assert ask(client, sound(LONG), url).choices[0].message.content == expected[0]
    counted = httpx.post(
        f"{sound_server.url}/chat_tokenize", json={"messages": user(sound(LONG), sound(SHORT))}, timeout=30
    ).json()
    assert len(counted["tokenize_response"]) == answer.usage.prompt_tokens
    (model,) = httpx.get(f"{sound_server.url}/v1/models").json()["data"]
    assert model["capabilities"] == ["completion", "audio"]


def test_responses_take_sounds(client):
    content = [sound(SHORT), {"type": "input_text", "text": "What?"}]
    answer = client.responses.create(model="heard", input=[{"role": "user", "content": content}], max_output_tokens=4)
    assert answer.usage.input_tokens_details.model_dump()["audio_tokens"] == 12


def test_a_killed_engine_changes_no_answer(sound_server, client, expected):
    texts = []

    def listen():
        texts.append(ask(client, sound(LONG), sound(SHORT)).choices[0].message.content)

    asking = [threading.Thread(target=listen) for _ in range(2)]
    for one in asking:
        one.start()
    time.sleep(0.1)
    os.kill(sound_server.engine_pid, signal.SIGKILL)
    for one in asking:
        one.join()
    assert texts == expected * 2


@pytest.mark.parametrize(
    ("part", "word"),
    [
        (sound(b"nothing"), r"messages\[0\].content\[0\].input_audio"),
        (sound(LONG[:40]), "the audio is empty|damaged"),
        (sound(wav_of(a_sound(2.5))), "longer than the 2 s"),
        ({"type": "input_audio", "input_audio": {"data": "%", "format": "wav"}}, "base64"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "a sound needs"),
        ({**sound(SHORT), "type": "audio_url"}, "a sound needs audio_url"),
        ({"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}, "must begin with data:audio"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "this model takes text and sounds"),
    ],
)
def test_what_cannot_be_heard_is_refused_by_name(client, part, word):
    with pytest.raises(openai.BadRequestError, match=word):
        ask(client, part)


def test_the_number_of_sounds_is_limited(client):
    with pytest.raises(openai.BadRequestError, match="max_sounds"):
        ask(client, *[sound(SHORT)] * 3)


def test_an_encoder_that_is_not_supported_is_named(tmp_path):
    """As of Gemma 4, whose encoder is a Conformer: its text and its images are served."""
    vision.make("Gemma 4", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["audio_config"] = {"model_type": "gemma4_audio"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = byte_level_bpe(300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    words = r"text and images.*; its audio encoder \(gemma4_audio\) is not supported"
    with LLM(str(tmp_path), kv_cache_memory="8MiB", max_num_batched_tokens=512) as llm:
        with pytest.raises(InvalidRequestError, match=words):
            llm.chat(user(sound(SHORT)))
        assert llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=2))[0].finished
    note = "; its audio encoder (gemma4_audio) is not supported"
    known = ChatFormat(tools=HERMES, thinks=None, switches=frozenset(), takes_images=True, encoder_note=note)
    with pytest.raises(InvalidRequestError, match=words):
        raise not_supported("input_audio", "messages[0]", known)
    assert "gemma4" not in str(not_supported("video_url", "messages[0]", known))


def test_a_sound_where_none_is_taken_has_an_error_that_says_where():
    known = ChatFormat(tools=HERMES, thinks=None, switches=frozenset(), takes_sounds=True)
    assert "in messages of the user, as input_audio" in str(not_supported("input_audio", "messages[0]", known))
