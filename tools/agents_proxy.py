"""A recording proxy between a client and a server: python -m tools.agents_proxy URL [--drop FIELD ...]

It passes requests and answers on, byte for byte, and records both. `--drop` leaves fields of JSON bodies out, to learn
what a client would do with a server that took them.
"""

import argparse
import asyncio
import json
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SHOWN_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "user-agent")
"""Headers that say what a client wants; the others are about the connection, or secret."""
OF_ONE_CONNECTION = ("connection", "content-length", "expect", "keep-alive", "transfer-encoding")
LARGEST_HEAD = 1 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    """Those of `SHOWN_HEADERS`."""
    body: Any
    """JSON, or text that is none; None if there is none."""
    status: int
    """0: the server closed the connection without one."""
    answer: str

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.status}"


class RecordingProxy:
    """A proxy in a thread of its own; a context manager."""

    def __init__(self, upstream: str, dropped: Collection[str] = (), port: int = 0) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream = (parts.hostname, parts.port)
        self._dropped = frozenset(dropped)
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.exchanges: list[Exchange] = []
        self.url = ""

    def __enter__(self) -> "RecordingProxy":
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=LARGEST_HEAD)

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one request and its answer on, and close the connection; its client opens another."""
        try:
            await self._exchange(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = await read_body(reader, headers)
        body = parse_body(content)
        if self._dropped and isinstance(body, dict):
            kept = {key: value for key, value in body.items() if key not in self._dropped}
            content = json.dumps(kept).encode()
        method, path, _ = first.split(" ", 2)
        answer = bytearray()
        try:
            await self._forward(request(first, headers, content), writer, answer)
        finally:
            head, _, rest = bytes(answer).partition(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1]) if head else 0
            text = (unchunked(rest) if b"transfer-encoding: chunked" in head.lower() else rest).decode(errors="replace")
            shown = {name: headers[name] for name in SHOWN_HEADERS if name in headers}
            self.exchanges.append(Exchange(method, path, shown, body, status, text))

    async def _forward(self, content: bytes, writer: asyncio.StreamWriter, answer: bytearray) -> None:
        upstream, sender = await asyncio.open_connection(*self._upstream)
        try:
            sender.write(content)
            while piece := await upstream.read(1 << 16):
                answer += piece
                writer.write(piece)
                await writer.drain()
        finally:
            sender.close()


def parse_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The first line of a request, and its headers by their names in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if line)
    return first, {name.strip().lower(): value.strip() for name, value in pairs}


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    """A request's body."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", 0)))
    content = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        content += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return bytes(content)


def unchunked(body: bytes) -> bytes:
    """A body without the frames of its chunks, as far as it came."""
    content = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        content += body[:length]
        body = body[length + 2 :]
    return bytes(content)


def parse_body(content: bytes) -> Any:
    """JSON, else text; None if it is empty."""
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def request(first: str, headers: dict[str, str], content: bytes) -> bytes:
    """A request's bytes, for a connection that is closed after it."""
    kept = {name: value for name, value in headers.items() if name not in OF_ONE_CONNECTION}
    kept |= {"connection": "close", "content-length": str(len(content))}
    lines = [first, *(f"{name}: {value}" for name, value in kept.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("upstream", metavar="URL")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--drop", action="append", default=[], metavar="FIELD", help="leave this field of bodies out")
    options = parser.parse_args()
    with RecordingProxy(options.upstream, options.drop, options.port) as proxy:
        print(f"{proxy.url} -> {options.upstream}; Ctrl-C prints what was said", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            for exchange in proxy.exchanges:
                print(exchange, json.dumps([exchange.headers, exchange.body]), exchange.answer, sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
