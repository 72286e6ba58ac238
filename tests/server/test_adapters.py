"""Adapters over HTTP: chosen by name in every dialect, loaded and unloaded while the server serves."""

from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from fastapi import FastAPI

from penstock.api.request import Adapter
from penstock.frontend.adapters import AdapterNames
from penstock.frontend.client import AsyncEngine
from tests.server.in_process import with_app
from tests.server.running import RunningServer, running_server
from tests.server.test_calls import events_of
from tests.server.test_calls import post as calls_post
from tests.support import fetch
from tests.support.adapters import write_adapter
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    made = {name: write_adapter(folder / name, tiny_llama, seed=seed) for seed, name in enumerate(("sql", "poem"))}
    return made | {"wrong": write_adapter(folder / "wrong", tiny_llama, r=8)}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, folders: dict[str, Path]) -> Iterator[RunningServer]:
    flags = ["--model", str(tiny_llama), "--served-model-name", "tiny", "--threads", "1", "--admin"]
    flags += ["--adapter", f"sql={folders['sql']}", "--adapter-memory", "1MiB", "--resumable-streams"]
    flags += ["--metrics-names", "vllm"]
    with running_server(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def complete(client: openai.OpenAI, model: str) -> str:
    made = client.completions.create(model=model, prompt="the quick", max_tokens=8, temperature=0)
    assert made.model == model
    return made.choices[0].text


def test_it_is_chosen_by_the_model_of_a_request_in_each_dialect(server: RunningServer, client: openai.OpenAI) -> None:
    base, sql = complete(client, "tiny"), complete(client, "sql")
    assert base != sql
    body = {"inputs": "the quick", "parameters": {"max_new_tokens": 8}}
    for adapter, wanted in ((None, base), ("sql", sql)):
        parameters = body["parameters"] | ({"adapter_id": adapter} if adapter else {})
        made = fetch.post(f"{server.url}/generate", json=body | {"parameters": parameters}).json()
        assert made["generated_text"] == wanted
    messages = [{"role": "user", "content": "the quick"}]
    chat = client.chat.completions.create(model="sql", messages=messages, max_tokens=8, temperature=0)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        cold = {"temperature": 0.0}  # which newer versions of the client take here alone
        message = other.messages.create(model="sql", messages=messages, max_tokens=8, extra_body=cold)
    response = client.responses.create(model="sql", input=messages, max_output_tokens=8, temperature=0)
    assert chat.model == message.model == response.model == "sql"
    assert chat.choices[0].message.content == message.content[0].text == response.output_text
    pieces = client.completions.create(model="sql", prompt="the quick", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == sql


def test_models_are_listed_with_their_parents(server: RunningServer, folders: dict[str, Path]) -> None:
    listed = fetch.get(f"{server.url}/v1/models").json()
    assert [(item["id"], item["parent"]) for item in listed["data"]] == [("tiny", None), ("sql", "tiny")]
    assert listed["data"][1]["root"] == str(folders["sql"])
    assert fetch.get(f"{server.url}/v1/models/sql").json() == listed["data"][1]


def post(server: RunningServer, path: str, **body: object) -> tuple[int, str]:
    answer = fetch.post(f"{server.url}{path}", json=body)
    return answer.status_code, answer.text


def test_it_is_loaded_and_unloaded_while_the_server_serves(
    server: RunningServer, client: openai.OpenAI, folders: dict[str, Path]
) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'poem' is not served here; 'tiny' is, with the adapters 'sql'"):
        complete(client, "poem")
    load = {"lora_name": "poem", "lora_path": str(folders["poem"])}
    status, text = post(server, "/v1/load_lora_adapter", **load)
    assert (status, text) == (200, "Success: LoRA adapter 'poem' added successfully.")
    poem = complete(client, "poem")
    assert poem not in (complete(client, "tiny"), complete(client, "sql"))
    taken = post(server, "/v1/load_lora_adapter", lora_name="poem", lora_path=str(folders["sql"]))
    assert (taken[0], "already" in taken[1]) == (400, True)
    replaced = {"lora_name": "poem", "lora_path": str(folders["sql"]), "load_inplace": True}
    assert post(server, "/v1/load_lora_adapter", **replaced)[0] == 200
    assert complete(client, "poem") == complete(client, "sql")
    status, text = post(server, "/v1/unload_lora_adapter", lora_name="poem")
    assert (status, text) == (200, "Success: LoRA adapter 'poem' removed successfully.")
    assert post(server, "/v1/unload_lora_adapter", lora_name="poem")[0] == 404
    with pytest.raises(openai.NotFoundError):
        complete(client, "poem")
    metrics = server.metrics()
    assert metrics["penstock_adapters_loaded"] == 2
    assert metrics['penstock_adapter_requests_total{adapter="poem"}'] == 2


def test_one_that_does_not_fit_fails_alone_and_by_name(
    server: RunningServer, client: openai.OpenAI, folders: dict[str, Path]
) -> None:
    status, text = post(server, "/v1/load_lora_adapter", lora_name="wrong", lora_path=str(folders["wrong"]))
    assert status == 400
    assert "the adapter 'wrong' cannot be used" in text
    assert "lora_A.weight has the shape [4, 128]" in text
    for name, path, words in (
        ("tiny", folders["poem"], "the model's own name"),
        ("a b", folders["poem"], "must not contain spaces"),
        ("none", "/nowhere", "there is no folder /nowhere"),
    ):
        status, text = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path))
        assert (status, words in text) == (400, True), text
    assert complete(client, "sql")


def test_a_stream_goes_on_with_the_adapter_that_it_was_begun_with(server: RunningServer) -> None:
    body = {"model": "sql", "prompt": "the quick", "max_tokens": 12, "stream": True, "ignore_eos": True}
    whole = events_of(calls_post(server, "/v1/completions", body))
    last = [event_id for event_id, _ in whole if event_id][5]
    assert events_of(calls_post(server, "/v1/completions", body, **{"last-event-id": last}))
    headers = {"last-event-id": last}
    refused = fetch.post(f"{server.url}/v1/completions", json=body | {"model": "tiny"}, headers=headers)
    assert refused.status_code == 400
    assert "other weights of an adapter" in refused.text


def test_gateways_see_which_adapters_run(server: RunningServer, client: openai.OpenAI) -> None:
    def use() -> list[str]:
        return [name for name in server.metrics() if name.startswith("vllm:lora_requests_info")]

    labels = 'max_lora="256",running_lora_adapters="{}",waiting_lora_adapters=""'
    assert use() == [f"vllm:lora_requests_info{{{labels.format('')}}}"]
    endless = {"max_tokens": 480, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="sql", prompt="the quick", **endless) as stream:
        next(iter(stream))
        assert use() == [f"vllm:lora_requests_info{{{labels.format('sql')}}}"]
    wait_until(lambda: use() == [f"vllm:lora_requests_info{{{labels.format('')}}}"])


def test_only_operators_load_adapters(tiny_llama: Path, folders: dict[str, Path]) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine, app: FastAPI) -> None:
        load = {"lora_name": "poem", "lora_path": str(folders["poem"])}
        assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 403
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "poem"})).status_code == 403

    with_app(talk, tiny_llama)


def test_a_message_names_few_of_many_adapters() -> None:
    adapters = AdapterNames(lambda: pytest.fail("no adapter is read"))
    assert adapters.describe() == "none"
    for number in range(30):
        adapters.add(Adapter(f"a{number}", "", "", 0))
    names = ", ".join(f"'a{number}'" for number in range(8))
    assert adapters.describe() == f"{names} and 22 more"
