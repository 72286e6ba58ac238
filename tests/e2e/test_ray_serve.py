"""Whole servers behind Ray Serve's proxy: one is killed under streams, and clients go on at the other by event ids."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from penstock.checkpoint.checkpoint import DEMO_FOLDER
from penstock.errors import ConfigError
from tests.e2e.test_fleet import bodies
from tests.e2e.test_killed_engine import Told, check_answers
from tests.support.ray_cluster import LocalCluster
from tests.support.waiting import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve uses what pydantic has deprecated
    from penstock.server.ray_serve import cells

START_SECONDS = 240.0
MODEL = "demo"


@pytest.fixture(scope="module")
def url(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two cells of one engine each, by a configuration of Ray Serve."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cell = {"name": "Cell", "num_replicas": 2}
    options = {"model": str(DEMO_FOLDER), "served_model_name": MODEL, "dtype": "float32", "kv_cache_memory": "64MiB"}
    application = {
        "name": "penstock",
        "import_path": "penstock.server.ray_serve:cells",
        "route_prefix": "/",
        "args": options | {"admin": True},
        "deployments": [cell],
    }
    config = tmp_path_factory.mktemp("serve") / "serve.yaml"  # JSON is YAML
    http = {"host": "127.0.0.1", "port": port}
    config.write_text(json.dumps({"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, str(config)]
    command[:0] = ["env", "--default-signal=INT"]  # tests that run in the background of a script ignore it
    log = config.with_suffix(".log")
    with log.open("w") as output:
        serving = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        found: set[int] = set()

        def two_cells() -> bool:
            assert serving.poll() is None, log.read_text()
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                found.add(engine_of_any(url))
            return len(found) == 2

        wait_until(two_cells, START_SECONDS)
        yield url
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(START_SECONDS)


def engine_of_any(url: str) -> int:
    """Process id of the engine of the cell that answers."""
    (engine,) = httpx.get(f"{url}/v1/admin/engines", timeout=60).json()["engines"]
    return int(engine["pid"])


class Reader:
    """The client of one stream, who asks again where it broke off."""

    def __init__(self, body: dict[str, Any]) -> None:
        extra = body["extra_body"]
        self._body = {name: value for name, value in body.items() if name != "extra_body"} | extra | {"model": MODEL}
        self._body["stream"] = "num_beams" not in extra
        self._last = ""
        self.told: Told = {}
        self.num_events = 0
        self.num_resumed = 0

    async def read(self, client: httpx.AsyncClient) -> Told:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if await self._read_on(client):
                    return self.told
            self.num_resumed += bool(self._last)
            await asyncio.sleep(0.1)

    async def _read_on(self, client: httpx.AsyncClient) -> bool:
        """Whether the end was heard."""
        headers = {"last-event-id": self._last} if self._last else {}
        async with client.stream("POST", "/v1/completions", json=self._body, headers=headers) as answer:
            assert answer.status_code != 400, await answer.aread()
            if answer.status_code != 200:
                return False
            if not self._body["stream"]:
                self._hear(json.loads(await answer.aread()))
                return True
            event_id = ""
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    event_id = value
                elif line == "data: [DONE]":
                    return True
                elif name == "data" and value.endswith("}"):
                    content = json.loads(value)
                    if "error" in content:
                        return False
                    self._hear(content)
                    self._last = event_id or self._last
                    event_id = ""
        return False

    def _hear(self, content: dict[str, Any]) -> None:
        self.num_events += 1
        for choice in content["choices"]:
            text, tokens, logprobs, reason = self.told.get(choice["index"], ("", [], [], None))
            assert reason is None, "an answer goes on after its end"
            if choice["logprobs"] is not None:
                tokens = tokens + choice["logprobs"]["tokens"]
                logprobs = logprobs + [logprob or 0.0 for logprob in choice["logprobs"]["token_logprobs"]]
            self.told[choice["index"]] = (text + choice["text"], tokens, logprobs, choice["finish_reason"])


def test_streams_of_a_cell_that_is_killed_go_on_at_another(url: str, expected: list[Told]) -> None:
    async def talk(readers: list[Reader], victim: int) -> list[Told]:
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            reading = asyncio.gather(*(reader.read(client) for reader in readers))
            while sum(reader.num_events for reader in readers) < len(readers) and not reading.done():
                await asyncio.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
            return await reading

    while True:  # until streams were broken off, and not only their last events on their way
        readers = [Reader(body) for body in bodies()]
        check_answers(asyncio.run(talk(readers, psutil.Process(engine_of_any(url)).ppid())), expected)
        if any(reader.num_resumed for reader in readers):
            break


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": "8000"}, "port is Ray Serve's affair"),
        ({"journal": "/tmp/journal"}, "journal is for one server"),
        ({"cluster": "auto"}, "cluster is for a server with engines on other nodes"),
        ({"engines": 2, "prefill_engines": 1}, "prefill_engines is not for cells"),
        ({"treads": "2"}, "threads"),
    ],
)
def test_what_a_cell_cannot_do_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cells(options)


def test_a_cell_reserves_the_cpus_of_its_engines_and_may_be_resized_by_serve() -> None:
    deployment = cells({"engines": "2", "threads": "3", "max_connections": "3000"})._bound_deployment
    assert deployment.ray_actor_options["num_cpus"] == 6
    assert deployment.max_ongoing_requests == 3000
