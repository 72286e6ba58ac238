"""What a second model costs the first, and how long a request waits that wakes a model.

    python -m benchmarks.speed.many_models FIRST SECOND [--rounds 5]
    bars: while the second model loads, 99 of 100 gaps between the first one's tokens within 1.5 times the usual;
          the first token of a request that wakes the second within 1.2 times the start of its engine alone

One server of both. Rounds of a stream of the first model alone, one while a request wakes the second, and the start of
the second model's engine in a process of its own; the median of the rounds' ratios. Both models have been loaded
before, so their packed weights are cached. Writes results/<machine>/many_models.json.
"""

import argparse
import asyncio
import math
import statistics
import sys
import time

import httpx

from benchmarks.report import report
from benchmarks.speed.journal import running_server
from penstock.config.engine_config import EngineConfig
from penstock.fleet.link import EngineLink
from penstock.fleet.replica import await_ready


async def gaps(http: httpx.AsyncClient, seconds: float, until: "asyncio.Future[float] | None" = None) -> list[float]:
    """Seconds between the first model's tokens: for a time, or until a future is done."""
    body = {"model": "first", "prompt": "one", "ignore_eos": True, "stream": True}
    found, began = list[float](), time.monotonic()
    while True:  # a stream ends with the context
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            last = 0.0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if last:
                    found.append(now - last)
                last = now
                if now - began > seconds if until is None else until.done() and found:  # a load may take a token's time
                    return found


async def wake(http: httpx.AsyncClient) -> float:
    """Seconds from a request for the unloaded second model to its first token."""
    began = time.monotonic()
    body = {"model": "second", "prompt": "one", "max_tokens": 1}
    (await http.post("/v1/completions", json=body)).raise_for_status()
    return time.monotonic() - began


async def unload(http: httpx.AsyncClient) -> None:
    (await http.post("/api/generate", json={"model": "second", "keep_alive": 0})).raise_for_status()
    while any(model["name"].startswith("second") for model in (await http.get("/api/ps")).json()["models"]):
        await asyncio.sleep(0.05)


async def plain_start(model: str) -> float:
    """Seconds that the second model's engine takes to start by itself."""
    config = EngineConfig.from_options(model=model, threads=1, max_memory="2GiB")
    began = time.monotonic()
    link = EngineLink(config)
    await await_ready(link)
    seconds = time.monotonic() - began
    await link.close(grace=5.0)
    return seconds


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


async def measure(url: str, second: str, rounds: int) -> dict[str, float]:
    stalls, wakes, slowest = [], [], []
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as http:
        await wake(http)
        for _ in range(rounds):
            await unload(http)
            usual = await gaps(http, seconds=3.0)
            waking = asyncio.ensure_future(wake(http))
            loading = await gaps(http, 0.0, waking)
            await waking
            stalls.append(p99(loading) / p99(usual))
            slowest.append(max(loading))
            await unload(http)
            plain = await plain_start(second)
            wakes.append(await wake(http) / plain)
    return {
        "p99 of gaps while loading / usual": statistics.median(stalls),
        "longest gap while loading, s": statistics.median(slowest),
        "wake / plain start": statistics.median(wakes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    models = ["--model", f"first={args.first}", "--model", f"second={args.second}", "--max-memory", "4GiB"]
    with running_server(*models, "--max-loaded-models", "2") as url:
        found = asyncio.run(measure(url, args.second, args.rounds))
    bars = {"p99 of gaps while loading / usual": 1.5, "wake / plain start": 1.2}
    return report("many_models", {name: (value, bars.get(name)) for name, value in found.items()})


if __name__ == "__main__":
    sys.exit(main())
