"""What the journal costs: tokens a second through HTTP at 64 streams, without it and with it.

    python -m benchmarks.speed.journal        (bar: at most 3 % of the throughput)

The demo model on one core; two servers side by side that take turns, so that the machine's moods meet both; the median
of the rounds' ratios. Writes results/<machine>/journal.json. Exits with 1 if the bar is missed.
"""

import argparse
import asyncio
import contextlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.report import report

STREAMS, TOKENS = 64, 128


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[str]:
    """The address of a server."""
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", "--threads", "1", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(found[1] for line in server.stderr if (found := re.search(r"serving \S+ at (http://\S+)", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # its log of requests
            yield url
        finally:
            server.send_signal(signal.SIGINT)


async def stream(http: httpx.AsyncClient, seed: int) -> None:
    body = {
        "model": "penstock-demo",
        "prompt": "Repeat after me: " + " ".join(f"word{seed + i}" for i in range(20)),
        "max_tokens": TOKENS,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_bytes():
            pass


async def throughput(url: str, first_seed: int) -> float:
    """Tokens a second of 64 streams at once."""
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as http:
        start = time.perf_counter()
        await asyncio.gather(*(stream(http, first_seed + i) for i in range(STREAMS)))
        return STREAMS * TOKENS / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        journal = ("--journal", str(Path(folder, "journal")))
        with running_server() as without, running_server(*journal) as with_journal:
            ratios = []
            for number in range(args.rounds + 1):
                pair = [with_journal, without] if number % 2 else [without, with_journal]
                rates = {url: asyncio.run(throughput(url, number * STREAMS)) for url in pair}
                print(f"without {rates[without]:7.0f} tokens/s, with {rates[with_journal]:7.0f}")
                ratios.append(rates[with_journal] / rates[without])
    cost = 100 * (1 - statistics.median(ratios[1:]))  # the first round warms up
    return report("journal", {"throughput that the journal costs at 64 streams, %": (cost, 3.0)})


if __name__ == "__main__":
    sys.exit(main())
