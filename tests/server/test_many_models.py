"""The application over several models: what is listed, shown and logged, and who may use what."""

import asyncio
import json
import threading

from penstock.api.request import Adapter
from penstock.checkpoint import checkpoint
from penstock.frontend.served_model import identity_of
from penstock.server import listed
from penstock.server.body_route import LARGE_BODY
from penstock.server.config import ServerConfig
from penstock.server.keys import load_keys
from penstock.server.logs import FIELDS
from tests.server.in_process import with_app
from tests.server.several_models import complete, names, with_models

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
