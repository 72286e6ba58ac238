"""Images in the Python API: an engine that says which images it got."""

import asyncio
import json

import pytest
from PIL import Image

from penstock import LLM, AsyncLLM
from penstock.config.engine_config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.fleet import link
from tests.support.pictures import ImageCore, file_of, square, url_of, write_model

CORE = "tests.support.pictures:ImageCore"
RED, BLUE = (200, 10, 30), (0, 0, 255)


class CoreHere(ImageCore):
    """In the caller's process."""

    def __init__(self, folder):
        super().__init__(EngineConfig.from_options(model=str(folder)), None)

    def add_request(self, request):
        super().add_request(request, (), None)

    def step(self):
        return super().step(lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(engine=CoreHere(folder)) as llm:
        yield llm


def told(output):
    about = json.loads(output.outputs[0].text)
    assert about["sound"]
    assert output.num_image_tokens == sum(image[2] * image[3] for image in about["images"])
    return [tuple(image[4]) for image in about["images"]]


def chat_of(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]


def test_a_chat_takes_each_form_of_an_image(llm, tmp_path):
    file = tmp_path / "red.png"
    file.write_bytes(square(RED))
    turned = Image.new("RGB", (32, 16), BLUE)
    turned.getexif()[0x0112] = 6
    forms = [
        {"type": "image", "image": Image.new("RGB", (16, 16), RED)},
        {"type": "image", "image": Image.new("RGBA", (16, 16), (*RED, 255))},
        {"type": "image", "image": str(file)},
        {"type": "image", "path": file},
        {"type": "image", "image": square(RED)},
        {"type": "image", "url": url_of(square(RED))},
        {"type": "image_url", "image_url": {"url": url_of(square(RED)), "detail": "low"}},
        {"type": "image_url", "image_url": url_of(square(RED))},
    ]
    assert told(llm.chat(chat_of(*forms))[0]) == [RED] * len(forms)
    (about,) = json.loads(llm.chat(chat_of({"type": "image", "image": turned}))[0].outputs[0].text)["images"]
    assert about[2:4] == [4, 2], "upright"
    prompt = llm.chat_prompt(chat_of(forms[0]))
    assert json.loads("".join(delta.text for delta in llm.stream(prompt)))["images"][0][4] == list(RED)
    several = llm.chat([chat_of(forms[0]), chat_of(), chat_of({"type": "image", "image": square(BLUE)})])
    assert [told(one) for one in several] == [[RED], [], [BLUE]]


def test_a_prompt_has_a_placeholder_for_each_image(llm):
    prompt = {"prompt": "a<|image_pad|>b<|image_pad|>", "multi_modal_data": {"image": [square(RED), square(BLUE)]}}
    assert told(llm.generate(prompt)[0]) == [RED, BLUE]
    one = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": square(BLUE)}}
    outputs = llm.generate([prompt, "text", one])
    assert [told(output) for output in outputs] == [[RED, BLUE], [], [BLUE]]
    assert outputs[2].prompt == "<|image_pad|>"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda llm: llm.chat(chat_of({"type": "image", "image": "no-such-file.png"})), "cannot be read"),
        (lambda llm: llm.chat(chat_of({"type": "image", "image": 5})), "PIL image, a path, bytes or a data URL"),
        (lambda llm: llm.chat(chat_of({"type": "image"})), "give the image"),
        (lambda llm: llm.chat(chat_of({"type": "image", "image": b"x"})), "no known format"),
        (lambda llm: llm.chat(chat_of({"type": "image", "url": "https://a.test/b"})), "must begin with data:image"),
        (lambda llm: llm.chat(chat_of(*[{"type": "image", "image": square(RED)}] * 17)), "17 images; at most 16"),
        (lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": square(RED)}}), "has 0 placeholders"),
        (lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"video": b""}}), "without video"),
        (lambda llm: llm.generate({"prompt": [1]}), "a prompt with images is"),
    ],
)
def test_what_is_wrong_with_an_image_is_said(llm, ask, words):
    with pytest.raises(InvalidRequestError, match=words):
        ask(llm)


def test_a_model_without_a_tower_says_that_it_takes_text_only(folder):
    core = CoreHere(folder)
    object.__setattr__(core.info, "image_input", None)
    with LLM(engine=core) as llm:
        for ask in (
            lambda: llm.generate({"prompt": "a", "multi_modal_data": {"image": square(RED)}}),
            lambda: llm.chat(chat_of({"type": "image", "image": square(RED)})),
        ):
            with pytest.raises(InvalidRequestError, match="takes text only"):
                ask()


def test_the_asynchronous_api_takes_the_same(folder, monkeypatch):
    monkeypatch.setattr(link, "EngineLink", lambda config, real=link.EngineLink: real(config, CORE))

    async def talk():
        async with AsyncLLM(str(folder)) as llm:
            picture = {"type": "image", "image": Image.new("RGB", (16, 16), RED)}
            chat = await llm.chat(chat_of(picture))
            prompt = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": file_of(Image.new("L", (16, 16), 9))}}
            text = "".join([delta.text async for delta in llm.stream(prompt)])
            return told(chat), json.loads(text)["images"][0][4]

    assert asyncio.run(asyncio.wait_for(talk(), 60)) == ([RED], [9, 9, 9])
