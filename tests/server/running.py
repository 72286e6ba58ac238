"""A real `penstock serve` in a process of its own, for tests that talk to it over real sockets."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support import fetch

READY = re.compile(r"serving (\S+) at ((?:https?://|unix:)[^\s\"]+)")


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    """Memory of a process by a field of /proc/PID/status: `VmRSS` is resident now, `VmHWM` the most that ever was."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


class RunningServer:
    """Starts at once and waits until it listens. `log` grows with what it writes to standard error."""

    def __init__(self, *flags: str) -> None:
        self.log: list[str] = []
        self.started = time.monotonic()
        address = () if "--uds" in flags or "--port" in flags else ("--port", "0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", "serve", *address, *flags],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as a terminal's foreground job has its own group
        )
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.model = self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            found = READY.search(line)
            if found:
                self.model, self.url = found.groups()
                self._listening.set()
        self._listening.set()

    def wait_until_listening(self, seconds: float = 120.0) -> "RunningServer":
        assert self._listening.wait(seconds), self.log
        assert self.url, self.log
        return self

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @property
    def engine_pid(self) -> int:
        (engine,) = self.engine_pids()
        return engine

    def engine_pids(self) -> set[int]:
        """Its children that run an engine, or begin to."""
        commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in self.children()}
        return {child for child, command in commands.items() if b"penstock.engine.process" in command}

    def signal(self, number: int) -> None:
        """As a terminal does: to the whole process group."""
        os.killpg(self.process.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self.wait(2.0)
        except subprocess.TimeoutExpired:  # it drains
            self.signal(signal.SIGTERM)
            return self.wait()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            assert self.process.stderr is not None
            self.process.stderr.close()

    def metrics(self) -> dict[str, float]:
        """Each sample by its name and labels, as in `penstock_kv_blocks{state="free"}`."""
        text = fetch.get(f"{self.url}/metrics").text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def post(self, path: str, **body: Any) -> httpx.Response:
        content = json.dumps({"model": self.model} | body)  # ASCII, so that an unpaired surrogate can be sent
        headers = {"content-type": "application/json"}
        return fetch.post(f"{self.url}{path}", content=content, headers=headers, timeout=60)

    def idle(self) -> bool:
        sample = self.metrics()
        return sample['penstock_kv_blocks{state="held"}'] == 0 and sample["penstock_num_requests_running"] == 0


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[RunningServer]:
    server = RunningServer(*flags)
    try:
        yield server.wait_until_listening()
    finally:
        if "huggingface_hub" in sys.modules:  # it keeps connections open, to a server that ends
            sys.modules["huggingface_hub"].close_session()
        server.stop()


def parse_events(body: bytes) -> list[Any]:
    """The data of each event, by the letter: `data: <one line>`, an empty line, nothing else; `[DONE]` at the end."""
    assert body.endswith(b"\n\n")
    events = body[:-2].split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event for event in events)
    data = [event[len(b"data: ") :] for event in events]
    assert data.pop() == b"[DONE]"
    return [json.loads(item) for item in data]
