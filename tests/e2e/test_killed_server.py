"""Both processes are killed at random, again and again: nothing accepted is lost, and nothing is told twice.

The clients do as `EventSource` does: when the connection breaks they ask the same again, with `Last-Event-ID`.
`TEST_KILLS=5` for as many kills as one likes.
"""

import asyncio
import json
import os
import random
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock.checkpoint.checkpoint import DEMO_FOLDER
from penstock.text.tokenizer import Tokenizer
from tests.e2e.crowd import make_visitors
from tests.server.running import RunningServer

KILLS = int(os.environ.get("TEST_KILLS", "2"))
SEED = int(os.environ.get("TEST_SEED", "1"))
NUM_STREAMS, NUM_CALLS = 48, 8


def make_bodies(model: str) -> list[dict[str, Any]]:
    visitors = make_visitors(Tokenizer.from_path(DEMO_FOLDER), seed=5)[:NUM_STREAMS]
    return [
        {
            "model": model,
            "prompt": visitor.prompt[:100],
            "temperature": visitor.params.temperature,
            "seed": i,
            "n": 2 if i % 8 == 5 else 1,
            "logprobs": 0,
            "max_tokens": 70 + 50 * KILLS - i,
            "ignore_eos": i % 3 > 0,
            "stream": True,
        }
        for i, visitor in enumerate(visitors)
    ]


@dataclass
class Reader:
    """A client of one stream, who knows no more than what came over the wire."""

    body: dict[str, Any]
    name: str
    tokens: dict[int, list[str]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    last: str | None = None
    asked: bool = False

    async def read(self, http: httpx.AsyncClient) -> None:
        while not await self._try(http):
            await asyncio.sleep(0.1)

    async def _try(self, http: httpx.AsyncClient) -> bool:
        """Whether the stream has come to its end."""
        headers = {"x-request-id": self.name}
        if self.last or self.asked:  # it may have been accepted, without a word having come back
            nothing = ".".join(["0"] * self.body["n"])
            headers["last-event-id"] = self.last or f"{self.name}/{nothing}"
        self.asked = True
        try:
            async with http.stream("POST", "/v1/completions", json=self.body, headers=headers) as answer:
                if answer.status_code == 400 and self.last is None:
                    self.asked = False
                    return False
                assert answer.status_code == 200, await answer.aread()
                return await self._hear(answer)
        except httpx.TransportError:
            return False

    async def _hear(self, answer: httpx.Response) -> bool:
        event_id = None
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            elif line == "data: [DONE]":
                return True
            elif line.startswith("data: "):
                self._take(json.loads(line[6:]))
            elif not line and event_id is not None:
                self.last, event_id = event_id, None
        return False

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in self.reasons, "an answer goes on after its end"
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["logprobs"]:
                self.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
            if choice["finish_reason"]:
                self.reasons[index] = choice["finish_reason"]

    def heard(self) -> object:
        return self.texts, self.tokens, self.reasons


def start(journal: Path, port: int) -> RunningServer:
    flags = ("--dtype", "float32", "--threads", "1", "--journal", str(journal), "--port", str(port))
    return RunningServer(*flags)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_streams_and_calls_come_to_their_end_though_both_processes_are_killed(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    journal, port = tmp_path / "journal", free_port()
    server = start(journal, port)

    async def scene() -> None:
        nonlocal server
        limits = httpx.Limits(max_connections=None)
        url = server.wait_until_listening().url
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
            bodies = make_bodies(server.model)
            undisturbed = [Reader(body, f"u{i}") for i, body in enumerate(bodies)]
            await asyncio.gather(*(reader.read(http) for reader in undisturbed))

            readers = [Reader(reader.body, f"d{i}") for i, reader in enumerate(undisturbed)]
            reading = asyncio.gather(*(reader.read(http) for reader in readers))
            asking = (ask(http, body, f"c{i}") for i, body in enumerate(bodies[:NUM_CALLS]))
            calls = [asyncio.ensure_future(request) for request in asking]
            await asyncio.gather(*(accepted(http, f"c{i}") for i in range(NUM_CALLS)))
            whole = num_heard(undisturbed)
            for kills in range(KILLS):
                due = whole * (kills + rng.uniform(0.2, 0.8)) / KILLS  # by progress: a clock says nothing of that
                while num_heard(readers) < due and not reading.done():
                    await asyncio.sleep(0.01)
                assert not reading.done(), "all is done before the kills: give it more to do"
                victims = [*server.children(), server.process.pid]
                rng.shuffle(victims)
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                server.stop()
                server = start(journal, port)
                await asyncio.to_thread(server.wait_until_listening)
            await reading
            assert not all(await asyncio.gather(*calls)), "no answer was lost: give the calls more to do"
            for i, (reader, expected) in enumerate(zip(readers, undisturbed, strict=True)):
                assert reader.heard() == expected.heard(), f"stream {i} is not what it is undisturbed"
            for i, expected in enumerate(undisturbed[:NUM_CALLS]):
                assert await result(http, f"c{i}") == expected.texts, f"call {i} is not what it is undisturbed"

    try:
        asyncio.run(scene())
    finally:
        server.stop()


def test_a_response_whose_end_a_client_has_seen_is_stored_though_both_processes_are_killed(tmp_path: Path) -> None:
    journal, port = tmp_path / "journal", free_port()
    server = start(journal, port).wait_until_listening()
    body = {"model": server.model, "max_output_tokens": 4}
    seen: list[dict[str, Any]] = []

    def create(stream: bool) -> dict[str, Any]:
        """The next response of the conversation; if it is streamed, the servers are killed as soon as it has come."""
        previous = {"previous_response_id": seen[-1]["id"]} if seen else {}
        more = {"input": f"turn {len(seen)}", "stream": stream} | previous
        if not stream:
            answer = httpx.post(f"{server.url}/v1/responses", json=body | more, timeout=60)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())
        with httpx.stream("POST", f"{server.url}/v1/responses", json=body | more, timeout=60) as events:
            for line in events.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: ") else {}
                if event.get("type") in ("response.completed", "response.incomplete"):
                    for pid in (*server.children(), server.process.pid):
                        os.kill(pid, signal.SIGKILL)
                    return dict(event["response"])
        raise AssertionError("it did not end")

    try:
        for _ in range(KILLS):
            seen += [create(False)]
            seen += [create(True)]
            server.stop()
            server = start(journal, port).wait_until_listening()
            for response in seen:
                assert httpx.get(f"{server.url}/v1/responses/{response['id']}").json() == response
        last = create(False)
        assert last["usage"]["input_tokens"] > seen[-1]["usage"]["input_tokens"], "it goes on with all turns"
    finally:
        server.stop()


def num_heard(readers: list[Reader]) -> int:
    """Tokens that all have heard of."""
    return sum(len(tokens) for reader in readers for tokens in reader.tokens.values())


async def ask(http: httpx.AsyncClient, body: dict[str, Any], name: str) -> bool:
    """Ask for a whole answer; whether it came."""
    try:
        await http.post("/v1/completions", json=body | {"stream": False}, headers={"x-request-id": name})
    except httpx.TransportError:
        return False
    return True


async def accepted(http: httpx.AsyncClient, name: str) -> None:
    while (await http.get(f"/v1/requests/{name}")).status_code != 200:
        await asyncio.sleep(0.01)


async def result(http: httpx.AsyncClient, name: str) -> dict[int, str]:
    while True:
        call = (await http.get(f"/v1/requests/{name}")).json()
        if call["finished"]:
            return {answer["index"]: answer["text"] for answer in call["prompts"][0]["answers"]}
        await asyncio.sleep(0.1)
