"""Hostile bytes beside good traffic: is every good answer what it was, and does memory stay flat?

    python -m benchmarks.robustness.hostile_soak --seconds 900        (bars: see `judge`)

The demo model. On the quiet server each question is asked once. Then good clients ask them again, streamed and with
log-probabilities, while attackers with a key of their own send floods of header fields, heads and bodies a byte at a
time, bodies that are cut, huge ones, halves of surrogate pairs, smuggled requests, garbage, requests without end on
one connection, the expensive calls of `hostile_calls.py`, chains of responses, and leave in the middle or close their
side. Each good answer must be the quiet server's, bit for bit, and `/health` must answer within a second, as a process
of its own measures. Both processes are sampled all along: the last quarter must not be above the second. The server's
history of steps fills for the first minutes, up to 20,000 steps or 600 s, with or without attacks: some MiB. A whole
run writes results/<machine>/hostile_soak.json; with `--quiet`, a control run without attackers,
hostile_soak_quiet.json. Exits with 1 if a bar is missed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import report
from benchmarks.robustness.hostile_calls import ABANDONED, CALLS

WHOLE = 120.0
"""Seconds from which the result is kept."""
GOOD_CLIENTS = 4
ATTACKERS = 2
"""Of each kind."""
BODY_TIMEOUT = 3.0
TRIES = 3
"""Of a good request, as openai's and anthropic's clients do."""
QUESTIONS = [
    {"prompt": text, "max_tokens": 24, "temperature": temperature, "seed": seed, "logprobs": 2, "ignore_eos": True}
    for seed, text in enumerate(("What is 37 + 58?", 'Reverse the word "river".', "Sort these numbers: 31, 4, 15, 92"))
    for temperature in (0, 0.9)
] + [{"prompt": "Sure?", "max_tokens": 8, "seed": 7, "logprobs": 2, "structured_outputs": {"choice": ["yes", "no"]}}]
GOOD, BAD = "sk-good", "sk-bad"
KEYS = f'''
[[key]]
name = "good"
secret = "{GOOD}"

[[key]]
name = "bad"
secret = "{BAD}"
operator = true
'''
FIELDS = f"Host: x\r\nAuthorization: Bearer {BAD}\r\n".encode()
HEAD = b"GET /health HTTP/1.1\r\n" + FIELDS
POST = b"POST /v1/completions HTTP/1.1\r\n" + FIELDS + b"Content-Type: application/json\r\n"
HEALTH_SECONDS = 1.0
"""Within which `/health` must answer."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")


@dataclass
class Soak:
    """What is going on, and what was seen."""

    host: str
    port: int
    pids: dict[str, int]
    rng: random.Random
    until: float
    expected: list[Any] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    good: int = 0
    repeated: int = 0
    """Good requests sent again after a 408 or a reset, as SDKs do: on a starved machine the client is late itself."""
    wrong: int = 0
    failed: int = 0
    attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    smuggled: int = 0
    seconds: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    """Seconds that each answer of /health took."""

    @property
    def running(self) -> bool:
        return time.monotonic() < self.until

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


# ── good traffic ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def ask_until_in_time(soak: Soak, http: httpx.AsyncClient, question: dict[str, Any], tries: int = TRIES) -> Any:
    """An answer; a request that arrived too late, or whose connection was closed for that, is sent again."""
    try:
        return await ask(http, question)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != 408 or tries == 1:
            raise
    except (httpx.ReadError, httpx.RemoteProtocolError):
        if tries == 1:
            raise
    soak.repeated += 1
    return await ask_until_in_time(soak, http, question, tries - 1)


async def ask(http: httpx.AsyncClient, question: dict[str, Any]) -> Any:
    """Text, tokens, log-probabilities and ending of a streamed answer."""
    text, tokens, ending = "", [], None
    body = {"model": "penstock-demo", "stream": True, **question}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                tokens.append(
                    choice["logprobs"] and (choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"])
                )
                ending = choice["finish_reason"]
    rows = [row for chunk in tokens if chunk for row in zip(*chunk, strict=True)]
    return [text, rows, ending]


async def good_client(soak: Soak, http: httpx.AsyncClient) -> None:
    while soak.running:
        number = soak.rng.randrange(len(QUESTIONS))
        start = time.monotonic()
        try:
            answer = await ask_until_in_time(soak, http, QUESTIONS[number])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            print(f"failed: {error!r}", file=sys.stderr)
            soak.failed += 1
            continue
        soak.good += 1
        soak.wrong += answer != soak.expected[number]
        soak.seconds.append(time.monotonic() - start)


# ── attacks: each is one connection ──────────────────────────────────────────────────────────────────────────────────

Attack = Callable[[Soak, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def send(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    for part in parts:
        writer.write(part)
        await writer.drain()


def posted(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"POST {path} HTTP/1.1\r\n".encode() + FIELDS + head.encode() + body


def last(request: bytes) -> bytes:
    """The request as the last of its connection."""
    return request.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n", 1)


async def header_flood(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    before = soak.rng.choice((b"", HEAD + b"\r\n"))
    await send(writer, before + HEAD, *([b"a: " + b"x" * 30_000 + b"\r\n"] * soak.rng.randrange(1, 200)))


async def many_fields(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await send(writer, HEAD + b"".join(b"a%d: b\r\n" % n for n in range(soak.rng.randrange(101, 20_000))) + b"\r\n")


async def drop_by_drop(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sent = soak.rng.choice((HEAD, HEAD + b"\r\n" + HEAD, POST + b"Content-Length: 90000\r\n\r\n"))
    await send(writer, sent)
    while soak.running:
        await send(writer, b"x")
        await asyncio.sleep(0.1)


async def cut_body(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = json.dumps({"model": "penstock-demo", "prompt": "x" * soak.rng.randrange(200_000)}).encode()
    sent = posted(body, soak.rng.choice(PATHS))
    await send(writer, sent[: soak.rng.randrange(len(sent))])
    writer.close()


async def half_a_pair(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    fields = ("prompt", "stop", "user", "response_format", "structured_outputs", "grammar", "\ud800", "messages")
    half = soak.rng.choice(("\ud800", ["a", "\udfff"], {"type": "regex", "value": "\udc00"}, {"\ud9ff": 1}))
    body = json.dumps({"model": "penstock-demo", "prompt": "a", soak.rng.choice(fields): half}).encode()
    await send(writer, last(posted(body + b" " * soak.rng.choice((0, 70_000)), soak.rng.choice(PATHS))))


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
SMUGGLING = (
    POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n12345" + SMUGGLED,
    POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Transfer-Encoding: chunked\r\n\r\n1_0\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Content-Length: +5\r\n\r\n12345" + SMUGGLED,
    POST + b"Content-Length: 5\r\n folded\r\n\r\n12345" + SMUGGLED,
    HEAD + b"x: a\rb\r\n\r\n" + SMUGGLED,
    HEAD + b"x: a\x00b\r\n\r\n" + SMUGGLED,
)


async def smuggle(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await send(writer, soak.rng.choice(SMUGGLING))


async def huge_body(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    mistakes: tuple[list[object], ...] = ([None], ["a"], [[1]], [{}])
    prompt = soak.rng.choice(mistakes) * soak.rng.randrange(300_000, 1_500_000)
    body = json.dumps({"model": "penstock-demo", "prompt": prompt}).encode()
    await send(writer, last(posted(body)))


async def garbage(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    noise = soak.rng.randbytes(soak.rng.randrange(1, 50_000))
    before = (
        b"",
        HEAD,
        POST + b"Transfer-Encoding: chunked\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        posted(b"")[:-2],
    )
    await send(writer, soak.rng.choice(before) + noise)


async def pipeline(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.TimeoutError):  # its answers are not read
        await asyncio.wait_for(send(writer, *([(HEAD + b"\r\n") * 1000] * 100)), 2)
    writer.transport.abort()


async def tiny_chunks(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    extension = b";" + b"x" * soak.rng.choice((0, 10, 50_000))
    await send(writer, POST + b"Transfer-Encoding: chunked\r\n\r\n", *([b"1" + extension + b"\r\n \r\n"] * 20_000))


async def hostile_fields(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    names = (b"x-request-id", b"x-queue-timeout", b"Last-Event-ID", b"authorization", b"traceparent", b"content-type")
    value = bytes(soak.rng.choice(range(0x20, 0x100)) for _ in range(soak.rng.randrange(200))).strip()
    body = b'{"model": "penstock-demo", "prompt": "a", "max_tokens": 1, "stream": true}'
    field = soak.rng.choice(names) + b": " + value + b"\r\n"
    target = b"/v1/requests/%ff%00%ed%a0%80?seconds=%ff"
    await send(writer, posted(body).replace(b"Host: x\r\n", b"Host: x\r\n" + field))
    await send(writer, last(HEAD.replace(b"/health", target) + field + b"\r\n"))


async def leave(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = {"model": "penstock-demo", "prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}
    await send(writer, posted(json.dumps(body).encode()))
    await reader.read(soak.rng.randrange(1, 2000))
    writer.transport.abort()


async def half_closed(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await send(writer, posted(b'{"model": "penstock-demo", "prompt": "a", "max_tokens": 50, "stream": true}'))
    writer.write_eof()


async def chain(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Responses that continue each other, from the first on or from one that does not exist."""
    previous = soak.rng.choice((None, "resp_unknown"))
    for _ in range(soak.rng.randrange(1, 40)):
        body = {"model": "penstock-demo", "input": "x" * 500, "max_output_tokens": 1, "previous_response_id": previous}
        await send(writer, posted(json.dumps(body).encode(), "/v1/responses"))
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"(?i)content-length: (\d+)", head)
        answer = await reader.readexactly(int(found[1]) if found else 0)
        if not head.startswith(b"HTTP/1.1 200"):
            return
        previous = json.loads(answer)["id"]


def call_attack(make: Callable[[random.Random], tuple[str, bytes]]) -> Attack:
    async def attack(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path, body = await asyncio.to_thread(make, soak.rng)
        await send(writer, last(posted(body, path)))
        if make in ABANDONED:
            writer.transport.abort()

    attack.__name__ = make.__name__
    return attack


async def stay(soak: Soak, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send nothing."""


ATTACKS: tuple[Attack, ...] = (
    header_flood,
    many_fields,
    drop_by_drop,
    cut_body,
    half_a_pair,
    smuggle,
    huge_body,
    garbage,
    pipeline,
    tiny_chunks,
    hostile_fields,
    leave,
    half_closed,
    chain,
    stay,
    *map(call_attack, CALLS),
)


async def attacker(soak: Soak, attack: Attack) -> None:
    """One connection after the other. What the server says is read for a while, and its statuses are counted."""
    while soak.running:
        async with connection(soak) as (reader, writer):
            soak.attacks[attack.__name__] += 1
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
                await asyncio.wait_for(attack(soak, reader, writer), 3 * BODY_TIMEOUT)
            received = b""
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                while data := await asyncio.wait_for(reader.read(1 << 16), 2 * BODY_TIMEOUT):
                    received = (received + data)[-(1 << 20) :]
            soak.smuggled += b"/smuggled" in received
            statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
            soak.statuses.update(statuses)
            if any(map(is_fault, statuses)):
                print(f"{attack.__name__} was answered {received[-2000:]!r}", file=sys.stderr)
        await asyncio.sleep(soak.rng.random() / 5)


def is_fault(status: int) -> bool:
    """Whether a status blames the server; 501 and 505 blame the request."""
    return status >= 500 and status not in (501, 505)


@contextlib.asynccontextmanager
async def connection(soak: Soak) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(soak.host, soak.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────


async def sample(soak: Soak, every: float) -> None:
    while soak.running:
        soak.samples.append({name: memory_of(pid) for name, pid in soak.pids.items()} | files_of(soak.pids["server"]))
        await asyncio.sleep(every)


def memory_of(pid: int) -> float:
    """MiB that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def files_of(pid: int) -> dict[str, float]:
    return {"files": len(list(Path(f"/proc/{pid}/fd").iterdir()))}


PROBE = """
import http.client, sys, time
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    begin = time.monotonic()
    try:
        connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        print(time.monotonic() - begin, flush=True)
    except Exception as error:
        print(99, error, flush=True)
    connection.close()
    time.sleep(0.2)
"""
"""A process of its own: this one is busy with its attacks."""


async def probe_health(soak: Soak, seconds: float) -> None:
    probe = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROBE, soak.host, str(soak.port), str(seconds)), stdout=asyncio.subprocess.PIPE
    )
    assert probe.stdout is not None
    async for line in probe.stdout:
        soak.health.append(float(line.split()[0]))
    await probe.wait()


async def soak_for(soak: Soak, seconds: float, *, quiet: bool) -> None:
    headers = {"authorization": f"Bearer {GOOD}"}
    async with httpx.AsyncClient(base_url=soak.url, timeout=60, headers=headers) as http:
        soak.expected = [await ask(http, question) for question in QUESTIONS]
        soak.until = time.monotonic() + seconds
        work = [good_client(soak, http) for _ in range(GOOD_CLIENTS)]
        work += [attacker(soak, attack) for attack in ATTACKS for _ in range(0 if quiet else ATTACKERS)]
        await asyncio.gather(*work, sample(soak, seconds / 200), probe_health(soak, seconds))
        again = [await ask(http, question) for question in QUESTIONS]
        soak.wrong += sum(answer != other for answer, other in zip(again, soak.expected, strict=True))


def judge(soak: Soak, log: list[str], *, whole: bool) -> dict[str, tuple[float, float | None]]:
    """Rows of (value, bar). Growth has bars in a whole run only: a short one is all warming up."""
    quarter = max(len(soak.samples) // 4, 1)
    early, late = soak.samples[quarter : 2 * quarter], soak.samples[-quarter:]

    def growth(name: str) -> float:
        return statistics.median(s[name] for s in late) - statistics.median(s[name] for s in early)

    print(f"attacks: {dict(soak.attacks)}; what they were answered: {dict(sorted(soak.statuses.items()))}")
    return {
        "good answers": (soak.good, None),
        "good requests that were sent again after a 408 or a closed connection": (soak.repeated, None),
        "hostile connections": (soak.attacks.total(), None),
        "good answers that failed": (soak.failed, 0),
        "good answers that are not the quiet server's": (soak.wrong, 0),
        "hostile requests answered with 5xx, but for 501 and 505": (
            sum(count for status, count in soak.statuses.items() if is_fault(status)),
            0,
        ),
        "smuggled requests that were answered": (soak.smuggled, 0),
        "tracebacks in the log": (sum("Traceback" in line for line in log), 0),
        "growth of the server's memory from the second to the last quarter, MiB": (
            growth("server"),
            32 if whole else None,
        ),
        "growth of the engine's memory, MiB": (growth("engine"), 16 if whole else None),
        "growth of the server's open files": (growth("files"), 16 if whole else None),
        **{
            f"memory of the server in quarter {n + 1}, MiB": (
                statistics.median(s["server"] for s in soak.samples[n * quarter : (n + 1) * quarter]),
                None,
            )
            for n in range(min(4, len(soak.samples)))
        },
        "largest memory of the server, MiB": (max(s["server"] for s in soak.samples), None),
        "slowest answer of /health, s": (max(soak.health, default=99.0), HEALTH_SECONDS if whole else None),
        "answers of /health that took longer": (sum(seconds > HEALTH_SECONDS for seconds in soak.health), None),
        "answers of /health": (len(soak.health), None),
        "median answer of /health, s": (statistics.median(soak.health or [99.0]), None),
        "load average of the machine at the end": (os.getloadavg()[0], None),
        "slowest good answer, s": (max(soak.seconds, default=0.0), None),
        "median good answer, s": (statistics.median(soak.seconds or [0.0]), None),
    }


@contextlib.contextmanager
def running_server(log: list[str], folder: Path) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Address and processes of a server whose log goes on in `log`."""
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    flags = ["--port", "0", "--dtype", "float32", "--threads", "1", "--body-timeout", str(BODY_TIMEOUT)]
    flags += ["--api-keys", str(keys), "--adapter-memory", "8MiB"]
    command = [sys.executable, "-m", "penstock.cli", "serve", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            told = (re.search(r"serving \S+ at http://([^:]+):(\d+)", line) for line in server.stderr)
            found = next(match for match in told if match)
            threading.Thread(target=lambda: log.extend(server.stderr or ()), daemon=True).start()
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            engine = next(int(c) for c in children if b"engine.process" in Path(f"/proc/{c}/cmdline").read_bytes())
            yield found[1], int(found[2]), {"server": server.pid, "engine": engine}
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="a control run, without attackers")
    args = parser.parse_args()
    log: list[str] = []
    with tempfile.TemporaryDirectory() as folder, running_server(log, Path(folder)) as (host, port, pids):
        soak = Soak(host, port, pids, random.Random(args.seed), 0.0)
        asyncio.run(soak_for(soak, args.seconds, quiet=args.quiet))
    for i in [i for i, line in enumerate(log) if "Traceback" in line][:3]:
        print("".join(log[i : i + 30]), file=sys.stderr)
    whole = args.seconds >= WHOLE
    rows = {"seconds": (args.seconds, None)} | judge(soak, log, whole=whole)
    return report("hostile_soak_quiet" if args.quiet else "hostile_soak", rows, keep=whole)


if __name__ == "__main__":
    sys.exit(main())
