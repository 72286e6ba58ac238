"""Sounds in the Python API: answers of real models about them, and the forms of a sound."""

import base64

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.errors import InvalidRequestError
from tests.support.hearing import a_sound, wav_of
from tests.support.sounds import FAMILIES, make

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
OPTIONS = {"dtype": "float32", "kv_cache_memory": "4MiB", "threads": 1, "block_size": 8}


def chat_of(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def sound(given):
    return {"type": "audio", "audio": given}


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def heard(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("heard"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("Qwen2-Audio", tmp_path_factory.mktemp("folder")).folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **OPTIONS, max_sounds=3, max_audio_bytes=100_000) as llm:
        yield llm


def test_greedy_answers_equal_those_of_transformers_alone_cached_in_chunks_and_in_company(heard):
    asked = chat_of(*map(sound, heard.sounds))
    other = chat_of(*map(sound, reversed(heard.sounds)))
    with LLM(str(heard.folder), **OPTIONS) as llm:
        prompt = llm.chat_prompt(asked)
        expected = heard.greedy(prompt.token_ids, 64)
        (alone,) = llm.chat(asked, GREEDY)
        assert alone.outputs[0].token_ids == expected
        assert alone.num_audio_tokens == sum(image.count for image in heard.images)
        assert alone.num_image_tokens == 0
        (cached,) = llm.chat(asked, GREEDY)
        assert cached.num_cached_tokens > 0
        assert cached.outputs[0].token_ids == expected
        (of_other,) = tokens_of(llm.chat(other, GREEDY))
        assert llm.stats().encoded_images == len(heard.images)
    with LLM(str(heard.folder), **OPTIONS, max_num_batched_tokens=12, max_num_seqs=3) as llm:
        assert tokens_of(llm.chat([asked, other, asked], GREEDY)) == [expected, of_other, expected]


def test_a_chat_takes_each_form_of_a_sound(llm, tmp_path):
    content = wav_of(a_sound(0.5))
    encoded = base64.b64encode(content).decode()
    url = f"data:audio/wav;base64,{encoded}"
    file = tmp_path / "talk.wav"
    file.write_bytes(content)
    forms = [
        sound(str(file)),
        {"type": "audio", "path": file},
        sound(content),
        sound(url),
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
    ]
    prompts = [llm.chat_prompt(chat_of(form)) for form in forms]
    assert all(prompt == prompts[0] for prompt in prompts)
    (image,) = prompts[0].images
    assert (image.count, image.height, image.width, image.is_sound) == (12, 16, 52, True)
    slower = llm.chat_prompt(chat_of(sound((np.zeros(4000), 8000))))
    assert (slower.images[0].count, slower.images[0].width) == (12, 52)
    prompt = {"prompt": "<|sound|>a<|sound|>", "multi_modal_data": {"audio": [content, a_sound(0.3)]}}
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=1))
    assert output.num_audio_tokens == 12 + 7


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([sound("no-such-file.wav")], "the sound 'no-such-file.wav' cannot be read"),
        ([sound(5)], "an array and its rate, not int"),
        ([sound((a_sound(0.2), 0.5))], "its rate an integer"),
        ([sound(np.zeros((2, 2), np.float32))], "one axis"),
        ([sound(np.full(1600, np.nan, np.float32))], "not finite"),
        ([{"type": "audio"}], "give the sound"),
        ([sound(b"RIFF")], "the audio is"),
        ([sound(b"")], "the audio is"),
        ([sound("https://a.test/b.wav")], "must begin with data:audio"),
        ([sound("data:image/png;base64,AAAA")], "image/png is not supported"),
        ([sound("data:audio/wav;base64,A")], "not valid base64"),
        ([sound(a_sound(2.1))], "longer than the 2 s that this model takes"),
        ([sound(a_sound(0.2))] * 4, "4 sounds; at most 3 are taken \\(max_sounds\\)"),
        ([{"type": "image", "image": b"x"}], "this model takes text and sounds, not images"),
        ([sound(a_sound(0.2)), {"type": "text", "text": "<|sound|>"}], "stands for a sound in this model's prompts"),
    ],
)
def test_what_cannot_be_heard_is_refused_by_name(llm, parts, word):
    with pytest.raises(InvalidRequestError, match=word):
        llm.chat(chat_of(*parts))
