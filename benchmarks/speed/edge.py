"""What the HTTP edge costs: of one core with a model that costs nothing, and of the throughput of a real one.

    python -m benchmarks.speed.edge  (bars: at most 8 % of the offline throughput at 64 streams is lost to HTTP, and
                                      10 ms of the time to the first token at idle)

1. The server's process over an engine that computes nothing (`null_core.py`): its CPU time a request and a streamed
   token, which says how many of each a second one core sustains, wherever load and engine run.
2. The demo model: 64 streams over HTTP against `LLM.generate` on the same work, in turns, medians of the rounds.
3. The demo model at idle: time to the first token over HTTP against `LLM.stream`.

Bars of the first part are guards against getting worse. Writes results/<machine>/edge.json. Exits with 1 if a bar is
missed.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.report import report
from penstock import LLM, SamplingParams

STREAMS, TOKENS = 64, 128
PROMPTS = [f"Repeat after me: {' '.join(f'word{seed + i}' for i in range(20))}" for seed in range(STREAMS)]


def serve_null(core: str = "benchmarks.speed.null_core:build_null_engine") -> None:
    """A server over an engine that computes nothing, until it is killed."""
    from penstock.config.engine_config import EngineConfig
    from penstock.fleet.link import EngineLink
    from penstock.frontend.client import AsyncEngine
    from penstock.server.app import create_app
    from penstock.server.config import ServerConfig
    from penstock.server.http import HttpServer

    engine_config, config = EngineConfig.from_options(), ServerConfig(log_level="warning")
    link = EngineLink(engine_config, core)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))

        async def run() -> None:
            engine = await AsyncEngine.start(engine_config, link)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            line = f"serving penstock-demo at {url}"
            announce = functools.partial(print, line, file=sys.stderr, flush=True)
            await HttpServer(create_app(engine, config), announce, 1, config).serve([listener])

        asyncio.run(run())


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[tuple[str, int]]:
    """Address and process id of a server."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(found[1] for line in server.stderr if (found := re.search(r"serving \S+ at (http://\S+)", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()
            yield url, server.pid
        finally:
            server.send_signal(signal.SIGKILL)  # its end is not what is measured; the engine goes with it


def cpu_seconds(pid: int) -> float:
    """What a process, without its children, has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Connection:
    """A client that costs next to nothing: the load is not to take the cores from what is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> "Connection":
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20))

    async def ask(self, prompt: str, max_tokens: int, *, stream: bool, **more: object) -> float:
        """Complete a prompt and read the answer whole; seconds until its first event, or until it came."""
        body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        content = json.dumps(body | {"ignore_eos": True, "stream": stream} | more).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        start = time.perf_counter()
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answered = await self._reader.readuntil(b"\r\n\r\n")
        assert answered.startswith(b"HTTP/1.1 200"), answered
        length = re.search(rb"content-length: (\d+)", answered)
        first: float | None = None
        if length:
            await self._reader.readexactly(int(length[1]))
        while not length:
            size = int(await self._reader.readline(), 16)
            await self._reader.readexactly(size + 2)
            first = first or time.perf_counter() - start
            if not size:
                break
        return first or time.perf_counter() - start

    def close(self) -> None:
        self._writer.close()


async def load(url: str, connections: int, calls: int, max_tokens: int, *, stream: bool) -> float:
    """Make `calls` calls on each of so many connections; the seconds that took."""
    opened = [await Connection.open(url) for _ in range(connections)]

    async def work(number: int, connection: Connection) -> None:
        for _ in range(calls):
            await connection.ask(PROMPTS[number % STREAMS], max_tokens, stream=stream)

    start = time.perf_counter()
    await asyncio.gather(*(work(number, connection) for number, connection in enumerate(opened)))
    seconds = time.perf_counter() - start
    for connection in opened:
        connection.close()
    return seconds


def microseconds_of_a_core(url: str, pid: int, connections: int, calls: int, max_tokens: int, *, stream: bool) -> float:
    """CPU time of the server's process for each request, or for each token of streams."""
    asyncio.run(load(url, connections, 1, max_tokens, stream=stream))
    before = cpu_seconds(pid)
    seconds = asyncio.run(load(url, connections, calls, max_tokens, stream=stream))
    used = cpu_seconds(pid) - before
    count = connections * calls * (max_tokens if stream else 1)
    print(f"{count / seconds:,.0f} a second here, {count / used:,.0f} a second of the server's core")
    return used / count * 1e6


def ratio_of_throughputs(url: str, llm: LLM, rounds: int) -> float:
    """Of HTTP to offline, on the same work; the first round warms up."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    ratios = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        llm.generate(PROMPTS, params)
        offline = time.perf_counter() - start
        through_http = asyncio.run(load(url, STREAMS, 1, TOKENS, stream=True))
        print(
            f"offline {STREAMS * TOKENS / offline:,.0f} tokens/s, HTTP {STREAMS * TOKENS / through_http:,.0f} tokens/s"
        )
        ratios.append(offline / through_http)
    return statistics.median(ratios[1:])


def milliseconds_to_first_token(url: str, llm: LLM, rounds: int) -> tuple[float, float]:
    """Medians at idle: offline, and over HTTP."""
    # with log-probabilities, since a token that shows no text yet makes no event without them
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)

    async def over_http() -> list[float]:
        connection = await Connection.open(url)
        times = [await connection.ask(PROMPTS[0], 4, stream=True, logprobs=0) for _ in range(rounds)]
        connection.close()
        return times

    offline = []
    for _ in range(rounds):
        start = time.perf_counter()
        pieces = llm.stream(PROMPTS[0], params)
        next(iter(pieces))
        offline.append(time.perf_counter() - start)
        for _ in pieces:
            pass
    return statistics.median(offline) * 1e3, statistics.median(asyncio.run(over_http())) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--serve-null", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_null:
        serve_null()
        return 0
    with running([sys.executable, "-m", "benchmarks.speed.edge", "--serve-null"]) as (url, pid):
        request = microseconds_of_a_core(url, pid, 16, 100, 1, stream=False)
        token = microseconds_of_a_core(url, pid, STREAMS, 4, 256, stream=True)
    serve = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", "--threads", str(args.threads)]
    with LLM(threads=args.threads) as llm, running(serve) as (url, _):
        lost = 100 * (1 - ratio_of_throughputs(url, llm, args.rounds))
        offline, through_http = milliseconds_to_first_token(url, llm, 10 * args.rounds)
    print(f"first token at idle: offline {offline:.2f} ms, HTTP {through_http:.2f} ms")
    rows = {
        "a request with one token, µs of the server's core": (request, 2500.0),
        "a streamed token, µs of the server's core": (token, 120.0),
        f"throughput at {STREAMS} streams lost to HTTP, %": (lost, 8.0),
        "time to the first token at idle added by HTTP, ms": (through_http - offline, 10.0),
    }
    return report("edge", rows)


if __name__ == "__main__":
    sys.exit(main())
