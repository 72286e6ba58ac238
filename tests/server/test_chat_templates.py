"""A server whose model came with a chat template that loops or grows for some conversations."""

import json
import threading
from pathlib import Path

import pytest

from tests.server.running import running_server
from tests.support import fetch
from tests.support.checkpoints import CHAT_TEMPLATE, write_tiny_llama

LOOP = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
GROWING = "{% set ns = namespace(x='x') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny_llama(tmp_path_factory.mktemp("hostile-template"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}"
        "{% if messages[0].content == 'grow' %}" + GROWING + "{% endif %}" + CHAT_TEMPLATE
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with running_server("--model", str(folder), "--threads", "1") as running:
        yield running


def chat(server, content):
    return server.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=2)


def peak(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize(("content", "words"), [("loop", "processor time"), ("grow", "MiB of memory")])
def test_the_request_alone_fails_and_the_server_goes_on(server, content, words):
    assert chat(server, "hello").status_code == 200
    before, answers = peak(server.process.pid), []
    caller = threading.Thread(target=lambda: answers.append(chat(server, content)))
    caller.start()
    seen = 0
    while caller.is_alive():
        assert fetch.get(f"{server.url}/health").status_code == 200
        seen += 1
    caller.join()
    assert seen > 1
    (answer,) = answers
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert words in answer.json()["error"]["message"]
    assert chat(server, "hello").status_code == 200
    assert peak(server.process.pid) < before + 50 * MIB


def test_other_dialects_refuse_it_likewise(server):
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "loop"}]}
    assert server.post("/v1/messages", **body).status_code == 400
    assert server.post("/chat_tokenize", messages=body["messages"]).status_code in (400, 422)
    assert server.post("/v1/responses", input="loop").status_code == 400
    assert chat(server, "hello").status_code == 200


def test_a_variable_of_the_template_may_have_any_name(server):
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    names = {"self": 1, "tokenizer": 1, "conversation": 1, "variables": 1}
    assert server.post("/v1/chat/completions", **asked, chat_template_kwargs=names).status_code == 200
    assert server.post("/chat_tokenize", messages=asked["messages"], chat_template_kwargs=names).status_code == 200
