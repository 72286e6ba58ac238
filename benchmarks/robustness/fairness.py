"""Time to the first token of a quiet API key, alone and beside a key that keeps many requests open.

    python -m benchmarks.robustness.fairness --model FOLDER        (bars: 2 s, and 3 times as long as alone)

FOLDER is a checkpoint of about 135 million parameters; the result that is kept is that of SmolLM2-135M-Instruct. One
key keeps `--flood` streams open: whenever one ends it sends another. The quiet key sends one request after another,
pauses between them, and has each prompt computed anew. The steps that its requests waited and computed are those of
`/v1/requests/{id}/why`; they do not depend on how fast the machine is.
Writes results/<machine>/fairness.json. Exits with 1 if a bar is missed.
"""

import argparse
import asyncio
import contextlib
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import report

KEYS = """
[[key]]
name = "loud"
secret = "sk-loud"

[[key]]
name = "quiet"
secret = "sk-quiet"
"""
TOKENS = range(300, 900)
"""Prompts are made of these."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the two keys ask for."""

    flood: int
    flood_prompt: int
    flood_answer: int
    prompt: int
    answer: int
    requests: int
    pause: float


@dataclass(frozen=True, slots=True)
class Times:
    """Of the quiet key's requests: seconds to the first token, and steps."""

    seconds: list[float]
    waited: list[int]
    """Steps before the one in which its prompt was begun."""
    computed: list[int]
    """Steps from that one to its first token."""


def make_body(rng: random.Random, prompt: int, answer: int) -> dict[str, Any]:
    tokens = rng.choices(TOKENS, k=prompt)
    return {
        "model": "model",
        "prompt": tokens,
        "max_tokens": answer,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


def client_of(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits, headers={"authorization": f"Bearer sk-{key}"})


async def ask(http: httpx.AsyncClient, body: dict[str, Any], request_id: str | None = None) -> float:
    """Stream one answer to its end; seconds to its first token."""
    began, first = time.monotonic(), None
    headers = {} if request_id is None else {"x-request-id": request_id}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if first is None and line.startswith("data: {"):
                first = time.monotonic() - began
    assert first is not None, "an answer without a token"
    return first


async def flood(http: httpx.AsyncClient, load: Load, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        await ask(http, make_body(rng, load.flood_prompt, load.flood_answer))


async def ask_in_turn(http: httpx.AsyncClient, load: Load, name: str) -> Times:
    """The quiet key's requests, one after another."""
    rng, times = random.Random(name), Times([], [], [])
    for number in range(load.requests):
        await asyncio.sleep(load.pause * rng.uniform(0.5, 1.5))
        request_id = f"{name}-{number}-{rng.random()}"
        times.seconds.append(await ask(http, make_body(rng, load.prompt, load.answer), request_id))
        told = (await http.get(f"/v1/requests/{request_id}/why")).raise_for_status().json()
        events = told["requests"][0]["events"]
        times.waited.append(sum(event["steps"] for event in events if event["what"] == "waited"))
        times.computed.append(sum(event["steps"] for event in events if event["what"] == "computed"))
    return times


async def measure(url: str, load: Load) -> tuple[Times, Times]:
    """The quiet key's times alone, and beside the flood."""
    async with client_of(url, "quiet") as quiet, client_of(url, "loud") as loud:
        alone = await ask_in_turn(quiet, load, "alone")
        flooding = [asyncio.ensure_future(flood(loud, load, seed)) for seed in range(load.flood)]
        try:
            beside = await ask_in_turn(quiet, load, "beside")
            failed = [task for task in flooding if task.done()]
            assert not failed, f"of the flood {len(failed)} failed: {failed[0].exception()!r}"
        finally:
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
    return alone, beside


@contextlib.contextmanager
def running_server(keys: Path, flags: list[str]) -> Iterator[str]:
    """A server's address."""
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", "--served-model-name", "model"]
    command += ["--api-keys", str(keys), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(found[1] for line in server.stderr if (found := re.search(r"serving \S+ at (http://\S+)", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # its log of requests
            yield url
        finally:
            server.send_signal(signal.SIGINT)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a checkpoint's folder")
    parser.add_argument("--flood", type=int, default=200, help="streams that the loud key keeps open")
    parser.add_argument("--flood-prompt", type=int, default=200, help="tokens")
    parser.add_argument("--flood-answer", type=int, default=128, help="tokens")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the quiet key's prompts")
    parser.add_argument("--answer", type=int, default=16, help="tokens of its answers")
    parser.add_argument("--requests", type=int, default=12, help="of the quiet key")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between them")
    parser.add_argument("--trial", action="store_true", help="keep no result")
    args, flags = parser.parse_known_args()
    load = Load(args.flood, args.flood_prompt, args.flood_answer, args.prompt, args.answer, args.requests, args.pause)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        keys.write_text(KEYS)
        with running_server(keys, ["--model", args.model, *flags]) as url:
            alone, beside = asyncio.run(measure(url, load))
    for name, times in (("alone", alone), ("beside", beside)):
        print(
            f"{name}: {[round(s, 2) for s in times.seconds]} s; waited {times.waited}, computed {times.computed} steps"
        )
    usual, crowded = statistics.median(alone.seconds), statistics.median(beside.seconds)
    rows: dict[str, tuple[float, float | None]] = {
        "first token of the quiet key, alone, median, s": (usual, None),
        f"beside {args.flood} open requests of another key, median, s": (crowded, None),
        "beside them, slowest, s": (max(beside.seconds), 2.0),
        "times as long as alone, medians": (crowded / usual, 3.0),
        "steps before its prompt was begun, most": (max(beside.waited), None),
        "steps in which its prompt was computed, most": (max(beside.computed), None),
    }
    return report("fairness", rows, keep=not args.trial)


if __name__ == "__main__":
    sys.exit(main())
