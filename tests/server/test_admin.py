"""Engines are listed, added, drained and replaced over HTTP, by operators."""

import pytest

from penstock.cli import main
from penstock.cli.http import call
from penstock.errors import PenstockError
from penstock.server.config import ServerConfig
from penstock.server.keys import load_keys
from tests.server.in_process import with_app
from tests.server.running import running_server

ADMIN = ServerConfig(admin=True)


def states(answer):
    assert answer.status_code == 200, answer.text
    return {engine["place"]: engine["state"] for engine in answer.json()["engines"]}


def test_engines_are_added_and_drained(tmp_path):
    async def talk(http, engine, app):
        assert states(await http.get("/v1/admin/engines")) == {0: "up"}
        assert "engines" not in (await http.get("/health")).json()
        assert states(await http.post("/v1/admin/engines")) == {0: "up", 1: "up"}
        assert [engine["place"] for engine in (await http.get("/health")).json()["engines"]] == [0, 1]
        body = {"model": "rule", "prompt": [10], "max_tokens": 3}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        text = (await http.get("/metrics")).text
        assert 'penstock_place_up{place="1"} 1.0' in text
        assert text.count("# HELP penstock_engine_process_resident_memory_bytes") == 1
        assert states(await http.delete("/v1/admin/engines/0")) == {1: "up"}
        last = await http.delete("/v1/admin/engines/1")
        assert (last.status_code, "the only one" in last.text) == (400, True)
        assert (await http.post("/v1/completions", json=body)).status_code == 200

    with_app(talk, tmp_path, config=ADMIN)


def test_engines_are_replaced(tmp_path):
    async def talk(http, engine, app):
        (tmp_path / "trained").touch()
        answer = await http.post("/v1/admin/reload", json={})
        assert states(answer) == {1: "up"}
        assert answer.json()["engines"][0]["arithmetic"] == "trained"
        (tmp_path / "out-of-order").touch()
        answer = await http.post("/v1/admin/reload", json={})
        assert answer.status_code >= 400
        assert "fell over" in answer.text
        assert states(await http.get("/v1/admin/engines")) == {1: "up"}
        unknown = await http.post("/v1/admin/reload", json={"modle": "x"})
        assert "did you mean 'model'" in unknown.text

    with_app(talk, tmp_path, config=ADMIN)


def test_without_keys_the_flag_is_needed_and_with_keys_an_operator(tmp_path):
    async def without(http, engine, app):
        for method, path in (("GET", "engines"), ("POST", "engines"), ("DELETE", "engines/0"), ("POST", "reload")):
            answer = await http.request(method, f"/v1/admin/{path}", json={} if path == "reload" else None)
            assert (answer.status_code, "--admin" in answer.text) == (403, True)

    with_app(without, tmp_path)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "a"\nsecret = "sk-a"\n[[key]]\nname = "o"\nsecret = "sk-o"\noperator = true\n')

    async def with_keys(http, engine, app):
        for secret, status in (("sk-a", 403), ("sk-o", 200), ("none", 401)):
            answer = await http.get("/v1/admin/engines", headers={"authorization": f"Bearer {secret}"})
            assert answer.status_code == status
            if status == 403:
                assert (error := answer.json()["error"])["type"] == "permission_error", error
                assert error["code"] == "operators_only"

    with_app(with_keys, tmp_path, keys=load_keys(None, str(keys), private_cache=False))


def test_the_command_reloads_a_running_server(tiny_llama, capsys, monkeypatch):
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    flags = ("--model", str(tiny_llama), "--threads", "1", "--kv-cache-memory", "8MiB")
    with running_server(*flags, "--engines", "2", "--admin") as server:
        assert main(["reload", "--url", server.url]) == 0
        assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["engine 2", "engine 3"]
        assert server.post("/v1/completions", prompt=[5], max_tokens=3).status_code == 200
        with pytest.raises(PenstockError, match="answered 405"):
            call(server.url, "/v1/admin/engines/9", {}, None)
        assert main(["reload", "--url", server.url, "--model", "/no/such"]) == 2
        assert "no folder or file /no/such" in capsys.readouterr().err
        server.stop()
        assert main(["reload", "--url", server.url]) == 2
        assert "no answer from" in capsys.readouterr().err
