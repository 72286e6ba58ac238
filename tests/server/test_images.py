"""Images in the bodies of all dialects, by the real clients over real sockets; the engine says which images it got."""

import asyncio
import json
import socket
import threading
import time

import anthropic
import httpx
import ollama
import openai
import pytest

from penstock.config.engine_config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.fleet.link import EngineLink
from penstock.frontend.client import AsyncEngine
from penstock.server.app import create_app
from penstock.server.config import CallLimitsConfig, ServerConfig
from penstock.server.http import HttpServer
from penstock.server.tgi.inputs import split_images
from tests.frontend.images.test_pictures import HOSTILE
from tests.support.pictures import base64_of, square, url_of, write_model

CORE = "tests.support.pictures:ImageCore"
RED, BLUE = (200, 10, 30), (0, 0, 255)
RED_URL, BLUE_URL = url_of(square(RED)), url_of(square(BLUE, 32))
TEXT = {"type": "text", "text": "What?"}


class Served:
    """The application of a fresh engine at a real socket, in a thread of its own."""

    def __init__(self, folder, **options):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._config = EngineConfig.from_options(model=str(folder), **options)
        self.engine, self._server, self.url = self.run(self._open())

    async def _open(self):
        config = ServerConfig()
        engine = await AsyncEngine.start(self._config, EngineLink(self._config, CORE))
        listener = socket.create_server(("127.0.0.1", 0))
        listening = asyncio.Event()
        server = HttpServer(create_app(engine, config), listening.set, 1, config)
        self._serving = asyncio.ensure_future(server.serve([listener]))
        await listening.wait()
        return engine, server, f"http://127.0.0.1:{listener.getsockname()[1]}"

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self):
        async def close():
            self._server.should_exit = True
            await self._serving
            await self.engine.close()
            await self.loop.shutdown_default_executor()

        self.run(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def post(self, path, **body):
        return httpx.post(f"{self.url}{path}", json=body, timeout=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(folder):
    served = Served(folder, max_image_pixels=10_000, max_images=3)
    yield served
    served.close()


@pytest.fixture(scope="module")
def chat(served):
    """A function that answers messages by OpenAI's client: what the engine was told, and the answer."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:

        def ask(*messages, **options):
            answer = client.chat.completions.create(model="rule", messages=list(messages), **options)
            return json.loads(answer.choices[0].message.content), answer

        yield ask


@pytest.fixture(scope="module")
def claude(served):
    with anthropic.Anthropic(base_url=served.url, api_key="x", max_retries=0) as client:
        yield client


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def block(content, kind="image/png"):
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": base64_of(content)}}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def colours(told):
    assert told["sound"]
    return [tuple(image[4]) for image in told["images"]]


def test_images_of_a_chat_reach_the_engine_in_their_order(chat):
    told, answer = chat(user(image(RED_URL), TEXT, image(BLUE_URL, detail="high")))
    assert colours(told) == [RED, BLUE]
    (first, second) = told["images"]
    begin = len("user:") + 1
    assert first[:4] == [begin, 4, 2, 2]
    assert second[:4] == [begin + 4 + 1 + len("What?") + 1, 16, 4, 4]
    assert answer.usage.prompt_tokens == told["length"]
    assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == 20
    told, _ = chat(user({"type": "image_url", "image_url": BLUE_URL}, TEXT))
    assert colours(told) == [BLUE]


def test_earlier_turns_keep_their_images(chat):
    told, _ = chat(user(image(RED_URL)), {"role": "assistant", "content": "Red."}, user(TEXT))
    assert colours(told) == [RED]


def test_a_screenshot_in_a_tools_result_follows_it(chat):
    """The template renders results as text: the image then comes in a user's message after it."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        user(TEXT),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "seen"}, image(RED_URL)]},
    ]
    assert colours(chat(*turns)[0]) == [RED]
    assert colours(chat(*turns, user(image(BLUE_URL)))[0]) == [RED, BLUE]


def test_an_agents_loop_of_screenshots_by_anthropics_client(claude):
    turns = [user({"type": "text", "text": "Find it."})]
    for number, colour in enumerate((RED, BLUE, RED)):
        use = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {}}
        shot = {"type": "text", "text": "shot"}, block(square(colour))
        turns += [
            {"role": "assistant", "content": [use]},
            user({"type": "tool_result", "tool_use_id": use["id"], "content": list(shot)}),
        ]
        answer = claude.messages.create(model="rule", max_tokens=4000, messages=turns)
        told = json.loads(answer.content[0].text)
        assert colours(told) == [RED, BLUE, RED][: number + 1]
        counted = claude.messages.count_tokens(model="rule", messages=turns)
        assert counted.input_tokens == answer.usage.input_tokens == told["length"]


def test_an_image_in_anthropics_message_is_read_by_both_kinds_of_source(claude):
    by_url = {"type": "image", "source": {"type": "url", "url": RED_URL}}
    answer = claude.messages.create(model="rule", max_tokens=4000, messages=[user(by_url, block(square(BLUE)))])
    assert colours(json.loads(answer.content[0].text)) == [RED, BLUE]


def test_responses_take_images_in_messages_results_and_stored_turns(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        picture = {"type": "input_image", "image_url": RED_URL, "detail": "auto"}
        asked = {"role": "user", "content": [{"type": "input_text", "text": "What?"}, picture]}
        first = client.responses.create(model="rule", input=[asked])
        assert colours(json.loads(first.output_text)) == [RED]
        assert first.usage.input_tokens_details.model_dump()["image_tokens"] == 4
        call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
        shot = {"type": "function_call_output", "call_id": "a", "output": [{**picture, "image_url": BLUE_URL}]}
        second = client.responses.create(model="rule", input=[call, shot], previous_response_id=first.id)
        assert colours(json.loads(second.output_text)) == [RED, BLUE]


def test_tgi_takes_images_in_its_inputs(served):
    inputs = f"a![]({RED_URL})b![]({BLUE_URL}) ![](nothing)"
    told = json.loads(served.post("/generate", inputs=inputs).json()["generated_text"])
    assert colours(told) == [RED, BLUE]
    assert told["images"][0][0] == 2
    tokens = served.post("/tokenize", inputs=inputs).json()
    assert len(tokens) == told["length"]
    body = {"messages": [user(image(RED_URL), TEXT)]}
    tokenized = served.post("/chat_tokenize", **body).json()
    assert [one["text"] for one in tokenized["tokenize_response"]].count("<|image_pad|>") == 4
    assert "truncate would cut" in served.post("/generate", inputs=inputs, parameters={"truncate": 5}).text


def test_tokenizing_a_beginning_of_an_answer_that_spells_a_placeholder_is_refused(served):
    spelled = {"role": "assistant", "content": "A <|image_pad|>"}
    body = {"messages": [user(image(RED_URL), TEXT), spelled], "continue_final_message": True}
    refused = served.post("/chat_tokenize", **body)
    assert refused.status_code == 422  # as TGI says it
    assert "has 2 placeholders '<|image_pad|>' for 1 images" in refused.text


def test_ollamas_images_precede_their_text(served):
    with ollama.Client(served.url) as client:
        asked = {"role": "user", "content": "What?", "images": [square(RED), square(BLUE, 32)]}
        messages = [
            {"role": "user", "content": "", "images": [square(BLUE)]},
            {"role": "assistant", "content": "Blue."},
        ]
        told = json.loads(client.chat("rule", [*messages, asked]).message.content)
        assert colours(told) == [BLUE, RED, BLUE]
        generated = client.generate("rule", "What?", images=[square(RED)])
        assert (colours(json.loads(generated.response)), generated.context) == ([RED], None)
        assert colours(json.loads(client.generate("rule", "", images=[square(RED)]).response)) == [RED]
        assert "vision" in client.show("rule").capabilities
        with pytest.raises(ollama.ResponseError, match="images do not go with context"):
            client.generate("rule", "What?", images=[square(RED)], context=[1])


def refusal(served, *parts):
    reply = served.post("/v1/chat/completions", messages=[user(*parts)])
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_a_400_with_its_fault(served, name):
    content, words = HOSTILE[name]
    error = refusal(served, TEXT, image(url_of(content)))
    if content:  # an empty one is no image at all
        assert words in error["message"]
    assert error["param"] == "messages[0].content[1].image_url"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([image("https://example.org/a.png")], "--image-urls"),
        ([image("http://169.254.169.254/latest")], "--image-urls"),
        ([image("data:application/pdf;base64,AAAA")], "application/pdf is not supported"),
        ([image(RED_URL, detail="huge")], "detail must be"),
        ([{"type": "image", "image": RED_URL}], "an image needs image_url"),
        ([{"type": "image_url"}], "an image needs image_url"),
        ([{"type": "image_url", "image_url": {"url": 5}}], "an image needs image_url"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "video_url is not supported here"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio is not supported here"),
        ([{"type": "image_embeds", "image_embeds": "x"}], "image_embeds is not supported here"),
        ([image(RED_URL)] * 4, "4 images; at most 3"),
        ([image(RED_URL), {"type": "text", "text": "a <|image_pad|> b"}], "'<|image_pad|>', which stands for an image"),
        ([{"type": "text", "text": "<|image_"}, {"type": "text", "text": "pad|>"}, image(RED_URL)], "makes 2 place"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(served, parts, words):
    assert words in refusal(served, *parts)["message"]


def test_without_images_a_placeholder_is_text(chat, served):
    assert chat(user({"type": "text", "text": "a <|image_pad|> b"}))[0]["images"] == []
    ids = [13, 14, 13]
    told = served.post("/v1/completions", prompt=ids, max_tokens=4000).json()["choices"][0]["text"]
    assert json.loads(told) == {"length": 3, "images": [], "sound": True}


def test_files_and_documents_are_refused_by_name(served):
    by_file = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    for part, words in ((by_file, "base64 or url"), (pdf, "document is not supported here")):
        reply = served.post("/v1/messages", max_tokens=5, messages=[user(part)])
        assert reply.status_code == 400
        assert words in reply.text
    asked = [user({"type": "input_image", "file_id": "f"})]
    assert "file_id is not supported here" in served.post("/v1/responses", input=asked).text


def test_other_calls_go_on_beside_large_and_hostile_images(served):
    """Megabytes of a body are parsed, hashed and refused: the event loop answers others meanwhile."""
    large = image("data:image/png;base64," + "A" * 8_000_000)
    bomb = image(url_of(HOSTILE["a bomb"][0]))
    replies = []

    def send(part):
        replies.append(served.post("/v1/chat/completions", messages=[user(part)]))

    threads = [threading.Thread(target=send, args=(part,)) for part in (large, bomb)]
    for thread in threads:
        thread.start()
    waits = []
    while any(thread.is_alive() for thread in threads):
        begin = time.monotonic()
        assert served.post("/v1/completions", prompt=[20, 21], max_tokens=1).status_code == 200
        waits.append(time.monotonic() - begin)
    assert [reply.status_code for reply in replies] == [400] * 2
    assert sorted(waits)[len(waits) // 2] < 1.0


def test_the_model_says_that_it_sees(served):
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["capabilities"] == ["completion", "vision"]


def test_a_checkpoint_without_a_tower_takes_text_only():
    with pytest.raises(InvalidRequestError, match="this checkpoint takes text only"):
        split_images(f"a![]({RED_URL})", takes_images=False)
    assert split_images("![](https://example.org/a.png)", takes_images=False) == ["![](https://example.org/a.png)"]
    limits = CallLimitsConfig()
    assert limits.body_bytes("images") == 5 * limits.body_bytes("text") == 20 * 2**20
    assert CallLimitsConfig(max_body_bytes=7).body_bytes("images") == 7
