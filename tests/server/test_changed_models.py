"""Models, names and adapters that are added, replaced and deleted while an application of several models serves."""

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

import pytest

from penstock.api.request import Adapter
from penstock.checkpoint.added import Added, AddedAdapter, AddedFile, file_of_address
from penstock.checkpoint.created import created_models, find_created, name_adapter, write_adapter
from penstock.checkpoint.data_folder import data_folder, locked
from penstock.errors import AdapterError, OverloadedError
from penstock.frontend.adapters import AdapterNames
from penstock.server.ollama import creation, library, pull
from tests.engine.rule_core import HELD
from tests.server.in_process import with_app
from tests.server.several_models import ADMIN, complete, names, with_models
from tests.support.hub import hub


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
