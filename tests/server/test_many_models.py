"""The application over several models, whose engines run a rule: what is listed and shown, who may use what, and models
that are added, replaced and deleted while it serves.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from penstock.api.request import Adapter
from penstock.checkpoint import checkpoint
from penstock.checkpoint.added import Added, AddedAdapter, AddedFile, file_of_address
from penstock.checkpoint.created import created_models, find_created, name_adapter, write_adapter
from penstock.checkpoint.data_folder import data_folder, locked
from penstock.config.engine_config import EngineConfig
from penstock.errors import AdapterError, OverloadedError
from penstock.fleet.link import EngineLink
from penstock.fleet.model_broker import ModelBroker
from penstock.frontend.adapters import AdapterNames
from penstock.frontend.client import AsyncEngine
from penstock.frontend.limits import QueueLimits
from penstock.frontend.served_model import ServedModel, identity_of
from penstock.frontend.served_models import ServedModels
from penstock.server import listed
from penstock.server.added_models import AddedModels
from penstock.server.app import create_app
from penstock.server.body_route import LARGE_BODY
from penstock.server.config import ServerConfig
from penstock.server.keys import load_keys
from penstock.server.logs import FIELDS
from penstock.server.ollama import creation, library, pull
from tests.engine.rule_core import HELD, RULE_CORE
from tests.server.in_process import with_app
from tests.support.hub import hub

ADMIN = ServerConfig(admin=True)
KEYS = """
[[key]]
name = "one"
secret = "sk-one"
models = ["b", "tuned"]

[[key]]
name = "operator"
secret = "sk-op"
operator = true
"""


def with_models(talk, models, keys=None, config=ADMIN, added=None):
    """Run `talk(http, served)` against an application of these models. The first is loaded."""

    async def start(engine_config, beside):
        return await AsyncEngine.start(engine_config, EngineLink(engine_config, RULE_CORE), beside=beside)

    def plan(path, _num_others=0):
        return EngineConfig.from_options(model=str(path)), 10

    async def run():
        broker = ModelBroker(100, 3, 60.0)
        for name in models:
            broker.add_model(name, 10)
        each = [ServedModel(name, plan(path)[0]) for name, path in models.items()]
        served = ServedModels(each, broker, start, QueueLimits(), plan=plan)
        await served.open()
        try:
            app = create_app(served.main, config, keys, served=served, added=AddedModels(added))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://penstock", timeout=60) as http:
                await asyncio.wait_for(talk(http, served), 120)
        finally:
            await served.close()

    asyncio.run(run())


def complete(http, model, prompt=5, **options):
    body = {"model": model, "prompt": [prompt], "max_tokens": 3, **options}
    return http.post("/v1/completions", json=body)


async def names(http, **headers):
    cards = (await http.get("/v1/models", headers=headers)).json()["data"]
    tags = (await http.get("/api/tags", headers=headers)).json()["models"]
    assert [card["id"] for card in cards] == [tag["name"].removesuffix(":latest") for tag in tags]
    return [card["id"] for card in cards]


def test_lists_and_show_load_and_download_nothing(tiny_llama, monkeypatch):
    def fail(*_arguments):
        raise AssertionError("a list downloads nothing")

    monkeypatch.setattr(checkpoint, "_download", fail)

    async def talk(http, served):
        assert await names(http) == ["a", "b", "c"]
        shown = (await http.post("/api/show", json={"model": "b"})).json()
        first = (await http.post("/api/show", json={"model": "a"})).json()
        assert shown["details"] == first["details"]
        assert shown["template"] == first["template"]
        assert shown["capabilities"] == first["capabilities"]
        missing = await http.post("/api/show", json={"model": "c"})
        assert (missing.status_code, "downloaded when it is used" in missing.json()["error"]) == (404, True)
        assert served.status("b").state == "unloaded"
        assert identity_of(served.models["c"].config) is None
        assert identity_of(served.models["b"].config) == str(tiny_llama)

    with_models(talk, {"a": tiny_llama, "b": tiny_llama, "c": "some/never-cached"})


def test_a_key_uses_and_sees_its_models_alone(tiny_llama, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    one, operator = ({"authorization": f"Bearer {secret}"} for secret in ("sk-one", "sk-op"))

    async def talk(http, served):
        assert await names(http, **operator) == ["a", "b"]
        assert await names(http, **one) == ["b"]
        assert (await complete(http, "a")).status_code == 401
        for name in ("a", "never-served"):
            refused = await http.post("/v1/completions", json={"model": name, "prompt": [5]}, headers=one)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["type"]) == (
                403,
                "model_not_permitted",
                "permission_error",
            )
            assert error["message"] == f"this API key may not use the model {name!r}; it may use: b, tuned"
        assert (await http.get("/v1/models/a", headers=one)).status_code == 403
        for path in ("chat", "show", "generate"):
            refused = await http.post(f"/api/{path}", json={"model": "a", "messages": [], "prompt": ""}, headers=one)
            assert (refused.status_code, "may not use" in refused.json()["error"]) == (404, True), path
        refused = await http.post(
            "/v1/messages",
            json={"model": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
            headers=one,
        )
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert served.status("b").state == "unloaded"
        for model in (None, "b"):  # without a name the first that it may use
            answer = await http.post(
                "/v1/completions", json={"model": model, "prompt": [5], "max_tokens": 1}, headers=one
            )
            assert (answer.status_code, answer.json()["model"]) == (200, "b")
        missing = await http.post("/v1/completions", json={"model": "tuned", "prompt": [5]}, headers=one)
        assert missing.status_code == 404
        assert "'b' is" in missing.json()["error"]["message"]
        assert "'a'" not in missing.text
        assert (await http.post("/api/pull", json={"model": "x"}, headers=one)).status_code == 403

    with_models(talk, {"a": tiny_llama, "b": tiny_llama}, load_keys(None, str(file), private_cache=False))


def test_a_created_model_is_served_at_once_replaced_and_deleted(tiny_llama):
    async def talk(http, served):
        made = {"model": "mario", "from": "b", "system": "You are Mario.", "stream": False}
        assert (await http.post("/api/create", json=made)).json() == {"status": "success"}
        assert served.status("b").state == "unloaded", "its files alone are read"
        assert await names(http) == ["a", "b", "mario"]
        assert (await complete(http, "mario")).status_code == 200
        old = served.models["mario"].engine
        running = asyncio.ensure_future(complete(http, "mario", HELD, max_tokens=5))
        await asyncio.sleep(0.1)
        answer = await http.post("/api/create", json={**made, "system": "You are Luigi."})
        assert answer.status_code == 200, answer.text
        assert (await http.post("/api/show", json={"model": "mario"})).json()["system"] == "You are Luigi."
        said = await http.post("/api/chat", json={"model": "mario", "messages": [], "stream": False})
        assert said.json()["done_reason"] == "load"
        assert served.models["mario"].engine is not old
        assert not running.done()
        (find_created("mario") / "released").touch()
        assert (await running).json()["usage"]["completion_tokens"] == 5
        refused = await http.post("/api/create", json={**made, "model": "a"})
        assert "is served here under this name" in refused.json()["error"]
        assert (await http.request("DELETE", "/api/delete", json={"model": "mario:latest"})).status_code == 200
        assert await names(http) == ["a", "b"]
        assert not created_models()
        assert (await complete(http, "mario")).status_code == 404

    with_models(talk, {"a": tiny_llama, "b": tiny_llama})


def test_names_and_adapters_stay_when_a_model_is_replaced_and_what_does_not_fit_is_named(
    tiny_llama, tmp_path, monkeypatch, caplog
):
    file = AddedFile(tmp_path / "added.json")

    def read(_adapters, name, path):
        if path == "/odd":
            raise AdapterError("it has other shapes")
        return Adapter(name, path, "1" * 64, 0)

    monkeypatch.setattr(AdapterNames, "read", read)

    async def talk(http, served):
        made = {"model": "mario", "from": "b", "system": "You are Mario.", "stream": False}
        assert (await http.post("/api/create", json=made)).status_code == 200
        for source, name in (("mario", "chat"), ("chat:latest", "gpt/4:latest"), ("gpt/4", "gpt/4"), ("a", "a")):
            copied = await http.post("/api/copy", json={"source": source, "destination": name})
            assert copied.status_code == 200, copied.text
        assert served.status("mario").state == "unloaded", "a name needs no load"
        assert (await complete(http, "chat")).json()["model"] == "chat"
        adapters = served.models["mario"].engine.adapters
        for name in ("tuned", "odd"):
            adapters.add(Adapter(name, f"/{name}", "1" * 64, 0))
        copied = await http.post("/api/copy", json={"source": "tuned", "destination": "again"})
        assert copied.status_code == 200, copied.text
        assert (await http.post("/api/create", json=made)).status_code == 200
        assert await names(http) == ["a", "b", "mario", "chat", "gpt/4", "tuned", "odd", "again"]
        assert file.read() == Added(
            ("mario",), {"chat": "mario", "gpt/4": "mario"}, {"again": AddedAdapter("mario", "/tuned")}
        )
        taken = await http.post("/api/copy", json={"source": "a", "destination": "odd"})
        assert "is served here under this name" in taken.json()["error"]
        assert (await complete(http, "again")).json()["model"] == "again"
        assert await names(http) == ["a", "b", "mario", "chat", "gpt/4", "tuned", "again"]
        assert "the adapter odd of the model mario is not served: it has other shapes" in caplog.text
        assert (await complete(http, "odd")).status_code == 404
        for name in ("chat", "again"):
            assert (await http.request("DELETE", "/api/delete", json={"model": name})).status_code == 200
        assert file.read() == Added(("mario",), {"gpt/4": "mario"})
        for name in ("mario", "gpt/4"):
            assert (await http.request("DELETE", "/api/delete", json={"model": name})).status_code == 200
        assert file.read() == Added()

    with_models(talk, {"a": tiny_llama, "b": tiny_llama}, added=file)


def test_a_copy_stays_when_its_source_is_deleted(tiny_llama, tmp_path):
    """As in Ollama, whose copies are models of their own."""
    file = AddedFile(tmp_path / "added.json")

    async def talk(http, served):
        async def change(method, path, **body):
            answer = await http.request(method, f"/api/{path}", json=body)
            return answer.status_code, answer.text

        async def copy(source, destination):
            return await change("POST", "copy", source=source, destination=destination)

        async def delete(name):
            return (await change("DELETE", "delete", model=name))[0]

        made = {"model": "mario", "from": "b", "system": "You are Mario.", "stream": False}
        assert (await change("POST", "create", **made))[0] == 200
        assert ((await copy("mario", "chat"))[0], (await copy("b", "other"))[0]) == (200, 200)
        assert [await delete(name) for name in ("mario:latest", "b", "mario", "b")] == [200, 200, 404, 404]
        assert await names(http) == ["a", "other", "chat"]
        assert file.read() == Added(("mario",), {"chat": "mario", "other": "b"}, {}, ("mario",))
        for name, status in (("chat", 200), ("other", 200), ("mario", 404), ("b", 404)):
            answer = await complete(http, name)
            assert answer.status_code == status, name
        assert "'a' or 'other' or 'chat' is" in answer.json()["error"]["message"]
        assert (await http.post("/api/show", json={"model": "chat"})).json()["system"] == "You are Mario."
        assert (await copy("mario", "again"))[0] == 404
        for status, text in (await change("POST", "create", **made), await copy("a", "mario"), await copy("a", "b")):
            assert (status, "is still served as" in text) == (400, True), text
        assert (await copy("chat", "mario"))[0] == 200
        assert await names(http) == ["a", "other", "chat", "mario"]
        assert file.read() == Added(("mario",), {"chat": "mario", "other": "b"})
        assert [await delete(name) for name in ("mario", "other")] == [200, 200]
        assert created_models()
        assert (await change("POST", "pull", model="mario", stream=False))[0] == 200
        assert await names(http) == ["a", "chat", "mario"]
        assert [await delete(name) for name in ("mario", "chat")] == [200, 200]
        assert await names(http) == ["a"]
        assert file.read() == Added()
        assert not created_models(), "the files go with the last name"

    with_models(talk, {"a": tiny_llama, "b": tiny_llama}, added=file)


def test_a_single_model_keeps_its_last_name(tiny_llama):
    async def talk(http, _engine, app):
        own = app.state.serving.names.own
        copied = await http.post("/api/copy", json={"source": own, "destination": "chat"})
        assert copied.status_code == 200, copied.text
        for name, status in ((own, 200), ("chat", 400)):
            assert (await http.request("DELETE", "/api/delete", json={"model": name})).status_code == status
        assert await names(http) == ["chat"]

    with_app(talk, tiny_llama, config=ADMIN)


def test_the_files_of_a_removed_adapter_stay_until_its_requests_have_ended(tiny_llama, tmp_path, monkeypatch):
    folder, weights = shutil.copytree(tiny_llama, tmp_path / "model"), tmp_path / "weights"
    weights.touch()
    monkeypatch.setattr(AdapterNames, "read", lambda _self, name, path: Adapter(name, path, "2" * 64, 0))

    async def talk(http, served):
        paths = [
            name_adapter(write_adapter({"weights": weights}, tmp_path / "added.json"), name) for name in ("x", "y", "z")
        ]
        for name, path in zip(("x", "y", "z"), paths, strict=True):
            served.main.adapters.add(Adapter(name, str(path), "1" * 64, 0))
        running = [asyncio.ensure_future(complete(http, name, HELD, max_tokens=5)) for name in ("x", "y", "z")]
        await asyncio.sleep(0.1)
        replaced = {"lora_name": "z", "lora_path": "/z", "load_inplace": True}
        for changed in (
            await http.request("DELETE", "/api/delete", json={"model": "x"}),
            await http.post("/v1/unload_lora_adapter", json={"lora_name": "y"}),
            await http.post("/v1/load_lora_adapter", json=replaced),
        ):
            assert changed.status_code == 200, changed.text
        assert all(path.exists() for path in paths)
        (folder / "released").touch()
        assert [(await call).status_code for call in running] == [200] * 3
        while any(path.exists() for path in paths):
            await asyncio.sleep(0.01)

    with_models(talk, {"a": folder})


def test_a_name_that_another_call_takes_meanwhile_is_not_given_twice(tiny_llama, monkeypatch):
    is_asked, is_taken = threading.Event(), threading.Event()

    def find(_name):
        is_asked.set()
        assert is_taken.wait(30)
        return str(tiny_llama)

    monkeypatch.setattr(pull, "find_whole", find)

    async def talk(http, served):
        pulling = asyncio.ensure_future(http.post("/api/pull", json={"model": "x"}))
        assert await asyncio.to_thread(is_asked.wait, 30)
        assert (await http.post("/api/copy", json={"source": "a", "destination": "x"})).status_code == 200
        is_taken.set()
        assert "is served here under this name" in json.loads((await pulling).text.splitlines()[-1])["error"]
        assert await names(http) == ["a", "x", "b"]
        body = {"lora_name": "x", "lora_path": "/x"}
        monkeypatch.setattr(AdapterNames, "read", lambda _self, name, path: Adapter(name, path, "1" * 64, 0))
        for query in ("", "?model=b"):
            refused = await http.post(f"/v1/load_lora_adapter{query}", json=body)
            assert refused.status_code == 400, refused.text

    with_models(talk, {"a": tiny_llama, "b": tiny_llama})


def test_a_created_model_that_is_deleted_here_stays_for_its_name_in_another_server(tiny_llama):
    other = file_of_address(11999)
    other.change(lambda _: Added(("mario",)).with_name("luigi", "mario"))

    async def talk(http, served):
        made = {"model": "mario", "from": "a", "system": "You are Mario.", "stream": False}
        assert (await http.post("/api/create", json=made)).status_code == 200
        assert (await http.request("DELETE", "/api/delete", json={"model": "mario"})).status_code == 200
        assert "mario" not in served.models
        assert find_created("mario") is not None
        assert other.read() == Added(("mario",)).with_name("luigi", "mario")

    try:
        with_models(talk, {"a": tiny_llama})
    finally:
        other.change(lambda _: Added())


def test_a_model_that_is_created_while_one_of_its_name_is_deleted_keeps_its_files(tiny_llama, monkeypatch):
    is_asked, goes_on = threading.Event(), threading.Event()
    delete = library.delete_created

    def delete_later(name):
        is_asked.set()
        assert goes_on.wait(30)
        return delete(name)

    monkeypatch.setattr(library, "delete_created", delete_later)

    async def talk(http, _served):
        made = {"model": "mario", "from": "a", "system": "You are Mario.", "stream": False}
        assert (await http.post("/api/create", json=made)).status_code == 200
        deleting = asyncio.ensure_future(http.request("DELETE", "/api/delete", json={"model": "mario"}))
        assert await asyncio.to_thread(is_asked.wait, 30)
        creating = asyncio.ensure_future(http.post("/api/create", json=made))
        await asyncio.wait({creating}, timeout=0.5)
        goes_on.set()
        assert ((await deleting).status_code, (await creating).status_code) == (200, 200)
        assert find_created("mario") is not None
        assert (await complete(http, "mario")).status_code == 200
        assert (await http.request("DELETE", "/api/delete", json={"model": "mario"})).status_code == 200

    with_models(talk, {"a": tiny_llama})


@pytest.mark.parametrize("path", ["chat", "generate", "embed", "embeddings", "show"])
def test_a_call_that_waits_for_a_change_of_another_process_does_not_stop_the_others(
    tiny_llama, tmp_path, monkeypatch, path
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (data_folder() / "created" / ".deleted-other").mkdir(parents=True)
    is_locked, goes_on = threading.Event(), threading.Event()

    def change():
        with locked(data_folder() / ".lock"):
            is_locked.set()
            goes_on.wait(3)  # a loop that stands still does not set it

    async def talk(http, _engine, _app):
        with ThreadPoolExecutor(1) as other:
            other.submit(change)
            assert is_locked.wait(30)
            began, body = time.monotonic(), {"model": "unknown", "prompt": "Hi", "input": "Hi", "messages": []}
            asking = asyncio.ensure_future(http.post(f"/api/{path}", json=body))
            await asyncio.sleep(0.2)
            assert (await http.get("/api/version")).status_code == 200
            assert time.monotonic() - began < 2, "the loop stood still"
            assert not asking.done()
            goes_on.set()
            answer = await asking
            assert answer.status_code == 404, answer.text

    with_app(talk, tiny_llama)


def test_what_is_no_name_or_no_whole_model_is_refused(tiny_llama, tmp_path, monkeypatch):
    (tmp_path / "config.json").symlink_to(tiny_llama / "config.json")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    monkeypatch.setattr(creation, "find_local", lambda _name: tmp_path)

    async def talk(http, _served):
        for name in (":latest", "tgi", "dummy:latest", "", "a b", "x" * 300):
            refused = await http.post("/api/copy", json={"source": "a", "destination": name})
            assert refused.status_code == 400, (name, refused.text)
        made = {"model": "mario", "from": "org/repo", "system": "Hi", "stream": False}
        refused = await http.post("/api/create", json=made)
        assert (refused.status_code, "00001-of-00002" in refused.json()["error"]) == (400, True), refused.text
        assert await names(http) == ["a"]

    with_models(talk, {"a": tiny_llama})


def test_a_model_that_is_not_served_as_its_files_are_gone_can_be_deleted(tiny_llama, tmp_path):
    file = AddedFile(tmp_path / "added.json")
    file.change(lambda added: added.with_model("org/repo").with_name("chat", "org/repo"))

    async def talk(http, _served):
        assert (await http.request("DELETE", "/api/delete", json={"model": "org/repo:latest"})).status_code == 200
        assert file.read() == Added()
        assert (await http.request("DELETE", "/api/delete", json={"model": "org/repo"})).status_code == 404

    with_models(talk, {"a": tiny_llama}, added=file)


def test_a_pulled_model_is_served_without_a_restart(tiny_llama, tmp_path, monkeypatch):
    commit = "1" * 40
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / commit).symlink_to(tiny_llama)
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)

    async def talk(http, served):
        with hub(tmp_path / "hub", {"main": commit}) as endpoint:
            for name, value in (("ENDPOINT", endpoint), ("HUB_CACHE", str(tmp_path)), ("HUB_DISABLE_XET", "1")):
                monkeypatch.setenv(f"HF_{name}", value)
            answer = await http.post("/api/pull", json={"model": "hf.co/some/repo"})
            lines = [json.loads(line) for line in answer.text.splitlines()]
            assert [line["status"] for line in lines][:: len(lines) - 1] == ["pulling manifest", "success"], lines
            assert await names(http) == ["a", "hf.co/some/repo"]
            assert (await complete(http, "hf.co/some/repo")).json()["model"] == "hf.co/some/repo"
            whole = await http.post("/api/pull", json={"model": "some/other", "stream": False})
            assert whole.status_code == 400
            assert "could not be downloaded from the Hugging Face hub" in whole.json()["error"]
        answer = await http.post("/api/pull", json={"model": "llama3.2"})
        assert "nor a name of the Hugging Face hub" in json.loads(answer.text.splitlines()[-1])["error"]
        assert (await http.request("DELETE", "/api/delete", json={"model": "hf.co/some/repo"})).status_code == 200
        assert await names(http) == ["a"]
        last = await http.request("DELETE", "/api/delete", json={"model": "a"})
        assert (last.status_code, "is the only one" in last.json()["error"]) == (400, True)

    with_models(talk, {"a": tiny_llama})


def test_a_download_that_its_client_leaves_is_ended_and_few_run_at_a_time(monkeypatch):
    async def run():
        models = types.SimpleNamespace(num_pulls=0)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # a hub that never answers
            silent.settimeout(60)
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            downloading = asyncio.ensure_future(anext(pull._download(models, "some/repo")))
            asked, _ = await asyncio.to_thread(silent.accept)
            assert models.num_pulls == 1
            downloading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await downloading
            asked.settimeout(10)
            with asked:
                while asked.recv(65_536):  # until its process has ended
                    pass
        assert models.num_pulls == 0
        models.num_pulls = pull.MAX_PULLS
        with pytest.raises(OverloadedError):
            await anext(pull._download(models, "some/repo"))

    asyncio.run(run())


def test_a_pull_ends_with_a_response_whose_line_nobody_reads():
    ended, sent = [], asyncio.Event()

    async def steps():
        try:
            yield {"status": "pulling manifest"}
        finally:
            ended.append(True)

    async def receive():
        await sent.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            sent.set()
            await asyncio.sleep(60)

    async def run():
        response = pull._PullStream(steps())
        await asyncio.wait_for(response({"type": "http"}, receive, send), 10)
        assert ended

    asyncio.run(run())


def test_the_process_of_a_pull_ends_with_its_server():
    command = [sys.executable, "-m", "penstock.checkpoint.hub_pull", "some/repo"]
    environment = {**os.environ, "PENSTOCK_PARENT_PROCESS": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
    assert subprocess.run(command, env=environment, check=False, timeout=60).returncode == -signal.SIGKILL


def test_a_model_may_be_removed_while_it_is_listed(tiny_llama, monkeypatch):
    async def talk(http, served):
        is_asked, is_removed = threading.Event(), threading.Event()

        def find(*_arguments):
            is_asked.set()
            assert is_removed.wait(30)

        monkeypatch.setattr(listed, "find_on_disk", find)
        listing = asyncio.ensure_future(http.get("/v1/models"))
        assert await asyncio.to_thread(is_asked.wait, 30)
        served.remove_model("b")
        is_removed.set()
        assert (await listing).status_code == 200

    with_models(talk, {"a": tiny_llama, "b": tiny_llama})


def test_large_bodies_are_read_when_the_first_model_is_gone(tiny_llama):
    async def talk(http, served):
        served.remove_model("a")
        while served._closing or len(served.models) > 1:
            await asyncio.sleep(0.01)
        content = json.dumps({"model": "b", "prompt": [5], "max_tokens": 1}) + " " * LARGE_BODY
        answer = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text

    with_models(talk, {"a": tiny_llama, "b": tiny_llama})


def test_a_key_without_a_model_here_loads_none_and_is_told_no_name(tiny_llama, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(KEYS.replace('["b", "tuned"]', '["tuned"]'))
    one = {"authorization": "Bearer sk-one"}

    async def talk(http, served):
        refused = await http.post("/v1/completions", json={"prompt": [5]}, headers=one)
        assert (refused.status_code, "'a'" in refused.text, "tuned" in refused.text) == (403, False, True)
        missing = await http.get("/v1/models/tuned", headers=one)
        assert missing.json()["error"]["message"] == "the model 'tuned' is not served here"
        use = await served.use("b", None)
        use.engine.adapters.add(Adapter("tuned", "/tuned", "0" * 64, 10))
        assert (await http.get("/info", headers=one)).status_code == 200, "of the model with its adapter"
        use.engine.adapters.remove("tuned")
        use.end()
        for name in ("a", "b"):
            served.remove_model(name)
        assert (await http.post("/v1/completions", json={"prompt": [5]}, headers=one)).status_code == 403
        assert served.status("c").state == "unloaded"

    models = dict.fromkeys("abc", tiny_llama)
    with_models(talk, models, load_keys(None, str(file), private_cache=False))


def test_logged_prompts_are_in_the_words_of_their_model(tiny_llama, tmp_path, caplog):
    async def talk(http, served):
        assert (await complete(http, "b")).status_code == 200

    caplog.set_level("INFO", "penstock.access")
    with_models(talk, {"a": tiny_llama, "b": tmp_path}, config=ServerConfig(log_prompts=True))
    (prompts,) = [getattr(record, FIELDS)["prompts"] for record in caplog.records if record.name == "penstock.access"]
    assert prompts == ["[5]"], "this model has no tokenizer"


def test_a_key_of_an_adapter_needs_none_for_its_model(tiny_llama, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(KEYS.replace('["b", "tuned"]', '["tuned"]'))
    one = {"authorization": "Bearer sk-one"}

    async def talk(http, engine, app):
        refused = await http.get("/v1/models", headers=one)
        assert refused.json()["data"] == []
        for path in ("/v1/completions", "/api/pull"):
            refused = await http.post(path, json={"prompt": [5], "model": None if "v1" in path else "x"}, headers=one)
            assert refused.status_code == (403 if "v1" in path else 404)
            assert "rule" not in refused.text
        engine.adapters.add(Adapter("tuned", "/tuned", "0" * 64, 10))
        assert await names(http, **one) == ["tuned"]
        for seen in (
            await http.get("/v1/models", headers=one),
            await http.get("/v1/models/tuned", headers=one),
            await http.get("/api/tags", headers=one),
            await http.get("/api/ps", headers=one),
            await http.post("/api/show", json={"model": "tuned"}, headers=one),
            await http.get("/info", headers=one),
            await http.post("/v1/completions", json={"prompt": [5]}, headers=one),
        ):
            assert "tuned" in seen.text, seen.url
            assert '"rule' not in seen.text, "the name of its model"
            assert "'rule" not in seen.text
        assert (await http.post("/api/pull", json={"model": "tuned"}, headers=one)).status_code == 200
        assert (await http.post("/api/pull", json={"model": "rule"}, headers=one)).status_code == 404
        answer = await http.post(
            "/v1/completions", json={"model": "tuned", "prompt": [5], "max_tokens": 1}, headers=one
        )
        assert (answer.status_code, answer.json()["model"]) == (200, "tuned"), answer.text
        for body in ({"prompt": [5]}, {"model": "rule", "prompt": [5]}):
            assert (await http.post("/v1/completions", json=body, headers=one)).status_code == 403, body

    with_app(talk, tiny_llama, keys=load_keys(None, str(file), private_cache=False))
