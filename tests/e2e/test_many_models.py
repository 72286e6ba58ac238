"""One server of several models: they are loaded when used, unloaded when idle or for each other, and lose nothing."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.checkpoint.checkpoint import DEMO_FOLDER
from tests.server.running import RunningServer, running_server
from tests.support.waiting import wait_until

FLAGS = ("--threads", "1", "--max-loaded-models", "1")


@pytest.fixture(scope="module")
def several(tiny_llama: Path) -> Iterator[RunningServer]:
    """Two models, and memory for one."""
    with running_server("--model", f"a={tiny_llama}", "--model", f"b={DEMO_FOLDER}", *FLAGS) as running:
        running.model = "a"
        yield running


def states(server: RunningServer) -> dict[str, str]:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def complete(server: RunningServer, model: str | None, **body: object) -> httpx.Response:
    named = {} if model is None else {"model": model}
    body = {"prompt": "one two", "max_tokens": 4, "temperature": 0, **named, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_the_first_model_answers_at_once_and_another_when_it_is_named(several: RunningServer) -> None:
    assert states(several) == {"a": "loaded", "b": "unloaded"}
    first = complete(several, None)
    assert first.json()["model"] == "a"
    other = complete(several, "b")
    assert (other.status_code, other.json()["model"]) == (200, "b"), other.text
    wait_until(lambda: states(several) == {"a": "unloaded", "b": "loaded"})
    assert httpx.get(f"{several.url}/health").status_code == 200
    again = complete(several, "a")
    assert again.json()["choices"] == first.json()["choices"]
    log = "\n".join(several.log)
    assert "the model b is being loaded" in log
    assert "the model a is unloaded" in log


def test_a_name_that_no_model_has_is_unknown_and_loads_nothing(several: RunningServer) -> None:
    before = states(several)
    answer = complete(several, "c")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "the model 'c' is not served here; 'a' or 'b' is"
    assert states(several) == before


def test_a_stream_ends_before_its_model_is_unloaded_for_another(several: RunningServer) -> None:
    body = {"model": "a", "prompt": "one", "max_tokens": 300, "ignore_eos": True, "stream": True}
    answers: list[httpx.Response] = []
    with httpx.stream("POST", f"{several.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        other = threading.Thread(target=lambda: answers.append(complete(several, "b")))
        other.start()
        rest = [line for line in lines if line.startswith("data: ")]
    other.join(60)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert answers[0].status_code == 200


def test_ollamas_routes_name_the_models_and_obey_keep_alive(several: RunningServer) -> None:
    tags = httpx.get(f"{several.url}/api/tags").json()["models"]
    assert [tag["name"] for tag in tags] == ["a:latest", "b:latest"]
    body = {"model": "b:latest", "prompt": "one", "stream": False, "options": {"num_predict": 2}, "keep_alive": "1h"}
    answer = httpx.post(f"{several.url}/api/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "keep_alive" not in answer.headers.get("penstock-ignored", "")
    (loaded,) = httpx.get(f"{several.url}/api/ps").json()["models"]
    assert loaded["name"] == "b:latest"
    assert loaded["size"] > 0
    wrong = httpx.post(f"{several.url}/api/generate", json={**body, "keep_alive": "soon"}, timeout=60)
    assert wrong.status_code == 400
    unload = httpx.post(f"{several.url}/api/generate", json={"model": "b", "keep_alive": 0}, timeout=60)
    assert unload.json()["done_reason"] == "unload"
    wait_until(lambda: httpx.get(f"{several.url}/api/ps").json() == {"models": []})
    assert states(several) == {"a": "unloaded", "b": "unloaded"}
    assert httpx.get(f"{several.url}/health/ready").status_code == 200, "a server without a loaded model is well"


def test_a_call_waits_for_its_model_no_longer_than_it_says(several: RunningServer) -> None:
    headers = {"x-queue-timeout": "0.01"}
    model = "b" if states(several)["b"] == "unloaded" else "a"
    body = {"model": model, "prompt": "one", "max_tokens": 1}
    answer = httpx.post(f"{several.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "queue_timeout"


def test_metrics_and_requests_say_which_model_they_are_of(several: RunningServer) -> None:
    complete(several, "b", n=2)
    name = complete(several, "a").json()["id"]
    metrics = several.metrics()
    assert metrics['penstock_model_loaded{model="a"}'] == 1
    assert metrics['penstock_model_loaded{model="b"}'] == 0
    assert metrics['penstock_generation_tokens_total{model="b"}'] > 0
    assert metrics['penstock_model_info{model="b"}'] == 1
    account = httpx.get(f"{several.url}/v1/requests/{name}/why").json()["requests"][0]
    assert account["state"] == "ended"
    assert account["events"]


def test_an_engine_that_is_killed_is_replaced_beside_the_other_model(tiny_llama: Path, tmp_path: Path) -> None:
    """Both processes are killed with streams of both models open; the next server finishes both."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "one").symlink_to(tiny_llama)
    (models / "two").symlink_to(DEMO_FOLDER)
    flags = ("--models-dir", str(models), "--threads", "1", "--journal", str(tmp_path / "journal"))
    names = {}
    with running_server(*flags) as server:
        expected = {
            name: complete(server, name, max_tokens=100, ignore_eos=True).json()["choices"] for name in ("one", "two")
        }
        for name in ("one", "two"):
            body = {"model": name, "prompt": "one two", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
            headers = {"x-request-id": f"call-{name}"}
            url = f"{server.url}/v1/completions"
            with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=60) as stream:
                first = next(line for line in stream.iter_lines() if line.startswith("data: "))
                names[name] = json.loads(first[6:])["id"]
                engines = server.engine_pids()
                if name == "two":
                    for pid in (server.process.pid, *engines):
                        os.kill(pid, signal.SIGKILL)
        server.process.wait()
    with running_server(*flags) as server:
        for name in ("one", "two"):
            url = f"{server.url}/v1/requests/call-{name}"
            wait_until(lambda url=url: httpx.get(url).json().get("finished"), seconds=60)
            (answer,) = httpx.get(url).json()["prompts"][0]["answers"]
            assert answer["text"] == expected[name][0]["text"]
