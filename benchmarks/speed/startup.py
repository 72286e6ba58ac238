"""How long a user waits: for an import, for help, for the first token of a server just started; and what idling costs.

    python -m benchmarks.speed.startup  (bars: import 0.3 s, help 0.5 s, first token 5 s on the demo model, idle 2 %)

Medians of fresh processes. Writes results/<machine>/startup.json. Exits with 1 if a bar is missed.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.report import report

CLI = [sys.executable, "-m", "penstock.cli"]


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def server() -> Iterator[int]:
    """Start a server and ask it for a token; gives its process id, and ends it."""
    process = subprocess.Popen([*CLI, "serve", "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r"serving \S+ at (http://\S+)", line)))
        body = {"model": "penstock-demo", "prompt": "What is 37 + 58?", "max_tokens": 1}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 1
        yield process.pid
    finally:
        process.send_signal(signal.SIGKILL)  # its end is not what is measured; the engine goes with it
        process.communicate()


def first_token() -> None:
    with server():
        pass


def cpu_seconds(pid: int) -> float:
    """What a process and its children have computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def idle_percent(seconds: float) -> float:
    """CPU time of an idle server and its engine, in percent of one processor."""
    with server() as pid:
        time.sleep(1)  # threads that wait for the next step's work spin for a moment
        before = cpu_seconds(pid)
        time.sleep(seconds)
        return 100 * (cpu_seconds(pid) - before) / seconds


def median_seconds(work: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    rows = {
        "import penstock, s": (median_seconds(lambda: run([sys.executable, "-c", "import penstock"]), 9), 0.3),
        "penstock --help, s": (median_seconds(lambda: run([*CLI, "--help"]), 9), 0.5),
        "penstock serve, from the command to the first token, s": (median_seconds(first_token, 3), 5.0),
        "an idle server and its engine, % of a CPU": (idle_percent(20), 2.0),
    }
    return report("startup", rows)


if __name__ == "__main__":
    sys.exit(main())
