"""CPU time of the server's process for a streamed token: two source trees, alive at the same time, in turns.

    python -m benchmarks.speed.server_cpu OLD NEW     (bar of a change to this path: no more than before)

The engine computes nothing and makes a step every `--step` seconds, slower than the server: so each token is an event
of its own, as with a real model (`edge.py` measures the server at its limit, where events have many tokens). Streams
are chats over connections that cost next to nothing. Pairs in turns cancel most of what else the machine does.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.speed.edge import PROMPTS, running, serve_null


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads, which have not ended meanwhile; finer than /proc/PID/stat."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def stream_chats(url: str, streams: int, max_tokens: int) -> None:
    """Read so many chats at the same time, each over a connection of its own."""
    await asyncio.gather(*(stream_chat(url, PROMPTS[number % len(PROMPTS)], max_tokens) for number in range(streams)))


async def stream_chat(url: str, prompt: str, max_tokens: int) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    body = {"model": "penstock-demo", "messages": [{"role": "user", "content": prompt}], "stream": True}
    content = json.dumps(body | {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    answered = await reader.readuntil(b"\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 200"), answered
    size = -1
    while size:
        size = int(await reader.readline(), 16)
        await reader.readexactly(size + 2)
    writer.close()


def microseconds_a_token(url: str, pid: int, streams: int, tokens: int) -> float:
    before = cpu_seconds(pid)
    asyncio.run(stream_chats(url, streams, tokens))
    return (cpu_seconds(pid) - before) / (streams * tokens) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="two source trees: before and after")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of an engine's step")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_null("benchmarks.speed.null_core:build_paced_engine")
        return
    if len(args.trees) != 2:
        parser.error("give two trees: before and after")
    os.environ["PENSTOCK_BENCHMARK_STEP"] = str(args.step)
    used: list[list[float]] = [[], []]
    with ExitStack() as stack:
        servers = []
        for tree in args.trees:
            os.environ["PYTHONPATH"] = str(tree.resolve() / "src")
            command = [sys.executable, "-m", "benchmarks.speed.server_cpu", "--serve"]
            servers.append(stack.enter_context(running(command)))
        for round_number in range(args.rounds + 1):  # the first warms up
            for which in (0, 1) if round_number % 2 else (1, 0):
                used[which].append(microseconds_a_token(*servers[which], args.streams, args.tokens))
    before, after = (statistics.median(values[1:]) for values in used)
    print(f"{args.streams} streams: {before:.1f} and {after:.1f} µs of CPU time a token, ratio {after / before:.2f}")


if __name__ == "__main__":
    main()
