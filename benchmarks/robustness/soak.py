"""Mixed load with kills and aborts, for as long as one likes: does anything grow, leak or change?

    python -m benchmarks.robustness.soak --minutes 15        (bars: see `judge`; `--minutes 0.3` in the tests)

The demo model, with a journal. Clients stream, wait for whole answers, leave in the middle and ask for several answers;
the engine is killed or stopped every so often. Every answer must be the one that the same request got the first time.
What the server process holds is sampled all along: the last quarter must not be above the second.
A whole run writes results/<machine>/soak.json. Exits with 1 if a bar is missed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import report

WHOLE = 15.0
"""Minutes from which the result is kept."""
CLIENTS = 16
QUESTIONS = (
    "What is 37 + 58?",
    'Reverse the word "river".',
    "Sort these numbers: 31, 4, 15, 92",
    "Repeat after me: " + " ".join(f"word{i}" for i in range(60)),
)
Sample = dict[str, float]


@dataclass
class Soak:
    """What is going on, and what was seen."""

    url: str
    server: int
    rng: random.Random
    until: float
    answers: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    complete: int = 0
    left: int = 0
    wrong: int = 0
    failed: int = 0
    kills: int = 0

    @property
    def running(self) -> bool:
        return time.monotonic() < self.until

    def engines(self) -> list[int]:
        children = Path(f"/proc/{self.server}/task/{self.server}/children").read_text()
        return [int(child) for child in children.split()]


def make_body(rng: random.Random) -> dict[str, Any]:
    number = rng.randrange(24)
    return {
        "model": "penstock-demo",
        "prompt": QUESTIONS[number % len(QUESTIONS)],
        "temperature": 0.8 if number % 3 else 0,
        "seed": number,
        "n": 1 + (number % 5 == 0),
        "max_tokens": 20 + 7 * number,
        "ignore_eos": number % 2 == 1,
        "stream": number % 4 > 0,
    }


async def client(soak: Soak, http: httpx.AsyncClient) -> None:
    while soak.running:
        body = make_body(soak.rng)
        leaves_after = soak.rng.randrange(30) if body["stream"] and soak.rng.random() < 0.25 else None
        try:
            texts = await (stream(http, body, leaves_after) if body["stream"] else whole(http, body))
        except httpx.HTTPError as error:
            print(f"failed: {error!r}", file=sys.stderr)
            soak.failed += 1
            continue
        if texts is None:
            soak.left += 1
            continue
        soak.complete += 1
        soak.wrong += soak.answers.setdefault(json.dumps(body | {"stream": None}), texts) != texts


async def stream(http: httpx.AsyncClient, body: dict[str, Any], leaves_after: int | None) -> dict[int, str] | None:
    """The texts, or None for a client that left."""
    texts: dict[int, str] = {}
    chunks = 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise httpx.HTTPError(str(chunk))
                for choice in chunk["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                chunks += 1
                if leaves_after is not None and chunks > leaves_after:
                    return None
    return texts


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[int, str]:
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return {choice["index"]: choice["text"] for choice in answer.json()["choices"]}


async def kill(soak: Soak, every: float) -> None:
    """Every so often, once the engine has been at work again."""
    while soak.running:
        await asyncio.sleep(soak.rng.uniform(0.5, 1.5) * every)
        for pid in soak.engines():
            os.kill(pid, signal.SIGSTOP if soak.rng.random() < 0.2 else signal.SIGKILL)
            soak.kills += 1


async def sample(soak: Soak, every: float) -> None:
    while soak.running:
        soak.samples.append(look(soak.server))
        await asyncio.sleep(every)


def look(pid: int) -> Sample:
    """What a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(number) for name, number in re.findall(r"(VmRSS|Threads):\s+(\d+)", status)}
    return {
        "memory": found["VmRSS"] / 1024,
        "threads": found["Threads"],
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


async def idle_blocks(http: httpx.AsyncClient) -> float:
    """KV blocks that are held when nothing is open; it waits a little for that."""
    for _ in range(600):
        text = (await http.get("/metrics")).text
        held = float(re.findall(r'penstock_kv_blocks\{state="held"\} (\S+)', text)[0])
        if not held:
            break
        await asyncio.sleep(0.1)
    return held


async def soak_for(soak: Soak, kill_every: float, sample_every: float) -> float:
    """Everything at once until the time is up; the KV blocks that are held in the end."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=soak.url, timeout=None, limits=limits) as http:
        work = [client(soak, http) for _ in range(CLIENTS)]
        await asyncio.gather(*work, kill(soak, kill_every), sample(soak, sample_every))
        return await idle_blocks(http)


def judge(soak: Soak, held: float) -> dict[str, tuple[float, float]]:
    """Rows of (value, bar)."""
    quarter = max(len(soak.samples) // 4, 1)
    early, late = soak.samples[quarter : 2 * quarter], soak.samples[-quarter:]

    def growth(name: str) -> float:
        return statistics.median(s[name] for s in late) - statistics.median(s[name] for s in early)

    print(
        f"{soak.complete} answers, {soak.left} clients that left, {soak.kills} kills; in the end "
        + ", ".join(f"{value:.0f} {name}" for name, value in soak.samples[-1].items())
    )
    return {
        "answers that failed": (soak.failed, 0),
        "answers that are not those of the first time": (soak.wrong, 0),
        "KV blocks held in the end": (held, 0),
        "growth of the server's memory from the second to the last quarter, MiB": (growth("memory"), 16),
        "growth of its threads": (growth("threads"), 2),
        "growth of its open files": (growth("files"), CLIENTS),
    }


@contextlib.contextmanager
def running_server(journal: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server's process, and its address."""
    flags = ["--port", "0", "--dtype", "float32", "--threads", "1", "--journal", str(journal)]
    command = [sys.executable, "-m", "penstock.cli", "serve", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(found[1] for line in server.stderr if (found := re.search(r"serving \S+ at (http://\S+)", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # its log of requests
            yield server, url
        finally:
            server.send_signal(signal.SIGINT)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=WHOLE)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder, "journal")) as (server, url):
        seconds = 60 * args.minutes
        soak = Soak(url, server.pid, random.Random(args.seed), time.monotonic() + seconds)
        held = asyncio.run(soak_for(soak, args.kill_every, seconds / 200))
        rows = judge(soak, held)
    return report("soak", rows, keep=args.minutes >= WHOLE)


if __name__ == "__main__":
    sys.exit(main())
