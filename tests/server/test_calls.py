"""Calls of a journaled server: taken up again in every dialect, and asked for by name."""

import asyncio
import contextlib
import json
import sqlite3

import pytest

from tests.engine.rule_core import HELD, SLOW
from tests.frontend.recovery.test_journal_disk import LimitedFiles
from tests.server.in_process import with_app
from tests.server.running import running_server
from tests.support import fetch

LONG = {"max_tokens": 24, "temperature": 0.9, "seed": 3}
CALLS = {
    "completions": ("/v1/completions", {"prompt": "the quick", "n": 2, "stream": True, "ignore_eos": True} | LONG),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the fox"}], "stream": True} | LONG),
    "responses": (
        "/v1/responses",
        {"input": "the fox", "stream": True, "max_output_tokens": 24, "temperature": 0.9, "store": False},
    ),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "the fox"}], "stream": True, "max_tokens": 24},
    ),
    "generate_stream": (
        "/generate_stream",
        {"inputs": "the quick", "parameters": {"max_new_tokens": 24, "seed": 3, "do_sample": True}},
    ),
}


@pytest.fixture(scope="module")
def journaled(tiny_llama, tmp_path_factory):
    journal = tmp_path_factory.mktemp("journal") / "journal"
    flags = ("--model", str(tiny_llama), "--served-model-name", "tiny", "--threads", "1", "--journal", str(journal))
    with running_server(*flags) as running:
        yield running


def post(server, path, body, **headers):
    return fetch.post(
        f"{server.url}{path}",
        json=({"model": "tiny"} if path.startswith("/v1/") else {}) | body,
        headers=headers,
        timeout=60,
    )


def events_of(answer):
    """(id, data) of each event."""
    assert answer.status_code == 200, answer.text
    events = []
    for block in filter(None, answer.text.split("\n\n")):
        fields = {name: value.strip() for name, _, value in (line.partition(":") for line in block.split("\n"))}
        data = fields["data"]
        events.append((fields.get("id"), json.loads(data) if data != "[DONE]" else data))
    return events


def said(events):
    """The text of each answer in a stream's events, whatever the dialect."""
    texts = {0: "", 1: ""}
    for _, data in events:
        for index, text in _said(data) if data != "[DONE]" else ():
            texts[index] += text or ""
    return texts


def _said(data):
    for choice in data.get("choices", ()):
        yield choice["index"], choice.get("text") or choice.get("delta", {}).get("content")
    delta = data.get("delta") or data.get("token") or ""
    yield 0, delta if isinstance(delta, str) else delta.get("text")


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_is_taken_up_in_its_own_dialect_after_any_event_with_an_id(journaled, name):
    path, body = CALLS[name]
    whole = events_of(post(journaled, path, body))
    places = [place for place, (event_id, _) in enumerate(whole) if event_id]
    assert places  # few on a busy machine, where an event has several tokens
    for place in (places[0], places[len(places) // 2], places[-1]):
        rest = events_of(post(journaled, path, body, **{"last-event-id": whole[place][0]}))
        assert said(rest) == said(whole[place + 1 :])
        assert [data for _, data in rest if data == "[DONE]"] == [data for _, data in whole if data == "[DONE]"]


def test_a_call_is_asked_for_by_the_id_in_its_answer_and_by_the_one_it_was_sent_with(journaled):
    answer = post(journaled, "/v1/completions", {"prompt": ["the", "fox"]} | LONG, **{"x-request-id": "mine"}).json()
    by_name = fetch.get(f"{journaled.url}/v1/requests/mine").json()
    assert by_name == fetch.get(f"{journaled.url}/v1/requests/{answer['id']}").json()
    assert by_name["finished"]
    assert [answer["text"] for prompt in by_name["prompts"] for answer in prompt["answers"]] == [
        choice["text"] for choice in answer["choices"]
    ]


def test_a_call_that_is_not_known_is_not_found(journaled, server):
    for running, words in ((journaled, "no request 'x'"), (server, "--journal")):
        answer = fetch.get(f"{running.url}/v1/requests/x")
        assert answer.status_code == 404
        assert words in answer.json()["error"]["message"]


def test_an_id_of_another_call_or_of_none_is_refused(journaled, server):
    path, body = CALLS["completions"]
    (event_id, _), *_ = [event for event in events_of(post(journaled, path, body)) if event[0]]
    for running, changes, last in (
        (journaled, {"seed": 4}, event_id),
        (journaled, {"n": 1}, event_id),
        (journaled, {}, "nonsense"),
        (journaled, {"stream": False}, event_id),
        (server, {}, event_id),
    ):
        answer = post(running, path, body | changes, **{"last-event-id": last})
        assert answer.status_code == 400
        assert "Last-Event-ID" in answer.json()["error"]["message"]


def test_without_a_journal_events_have_no_ids(server):
    path, body = CALLS["completions"]
    assert not any(event_id for event_id, _ in events_of(post(server, path, body)))


# ── a disk that fails ────────────────────────────────────────────────────────────────────────────────────────────────


def ask(http, name, **body):
    body = {"model": "rule", "prompt": [SLOW], "max_tokens": 60, "ignore_eos": True} | body
    return http.post("/v1/completions", json=body, headers={"x-request-id": name})


async def until_status(http, path, status):
    while (answer := await http.get(path)).status_code != status:
        await asyncio.sleep(0.01)
    return answer


def test_on_a_full_disk_what_runs_ends_what_is_new_is_refused_and_with_space_all_is_as_before(tmp_path):
    folder = tmp_path / "journal"
    folder.mkdir()

    async def talk(http, engine, app):
        running = asyncio.ensure_future(ask(http, "running", prompt=[HELD]))
        await until_status(http, "/v1/requests/running", 200)
        with LimitedFiles(folder).full():
            await asyncio.wait_for(until_status(http, "/health/ready", 503), 20)
            assert "journal cannot be written" in (await http.get("/health/ready")).json()["reason"]
            assert (await http.get("/health")).status_code == (await http.get("/health/live")).status_code == 200
            for body in ({}, {"stream": True}):
                refused = await ask(http, "refused", **body)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
                assert refused.json()["error"]["code"] == "journal_unavailable"
            assert engine.admission.num_open == 1
            assert (await http.get("/v1/requests/refused")).status_code == 404
            (tmp_path / "released").touch()
            answer = await running
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert (await http.get("/v1/requests/running")).json()["finished"]
            assert "penstock_journal_failing 1.0" in (await http.get("/metrics")).text
        await until_status(http, "/health/ready", 200)
        assert "penstock_journal_failing 0.0" in (await http.get("/metrics")).text
        assert (await ask(http, "after", max_tokens=3)).status_code == 200

    async def later(http, engine, app):
        call = (await http.get("/v1/requests/running")).json()
        assert call["finished"]
        assert len(call["prompts"][0]["answers"][0]["token_ids"]) == 60
        assert (await http.get("/v1/requests/refused")).status_code == 404

    with_app(talk, tmp_path, journal=folder / "file", retry_seconds=0.05)
    with_app(later, tmp_path, journal=folder / "file", retry_seconds=0.05)


def test_a_call_that_the_disk_does_not_take_is_ended_and_leaves_no_trace(tmp_path):
    folder = tmp_path / "journal"
    folder.mkdir()

    async def talk(http, engine, app):
        with LimitedFiles(folder).full():  # an idle journal has not noticed
            refused = await ask(http, "refused", max_tokens=400)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "journal_unavailable")
            assert engine.admission.num_open == 0
        await until_status(http, "/health/ready", 200)
        assert (await http.get("/v1/requests/refused")).status_code == 404
        assert (await ask(http, "after", max_tokens=3)).status_code == 200

    with_app(talk, tmp_path, journal=folder / "file", retry_seconds=0.05)


def test_a_call_whose_record_is_damaged_is_told_so(tmp_path):
    async def talk(http, engine, app):
        assert (await ask(http, "mine", max_tokens=3)).status_code == 200

    async def later(http, engine, app):
        answer = await http.get("/v1/requests/mine")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "journal_damaged")
        assert 'penstock_journal_damaged_total{what="result"} 1.0' in (await http.get("/metrics")).text
        assert (await ask(http, "other", max_tokens=3)).status_code == 200

    with_app(talk, tmp_path, journal=tmp_path / "file")
    with contextlib.closing(sqlite3.connect(tmp_path / "file")) as database, database:
        database.execute("UPDATE requests SET record = x'00'")
    with_app(later, tmp_path, journal=tmp_path / "file")
