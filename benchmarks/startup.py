"""How long a user waits: for an import, for help, for the first token of a server that was just started.

    python benchmarks/startup.py        (bars: import 0.3 s, help 0.5 s, first token 5 s on the demo model)

Medians of fresh processes. Writes benchmarks/results/startup.json. Exits with 1 if a bar is missed.
"""

import json
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable

from report import report

CLI = [sys.executable, "-m", "penstock.cli"]


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def first_token() -> None:
    """Start a server, ask it for a token, and end it."""
    server = subprocess.Popen([*CLI, "serve", "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"serving \S+ at (http://\S+)", line)))
        body = {"model": "penstock-demo", "prompt": "What is 37 + 58?", "max_tokens": 1}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 1
    finally:
        server.send_signal(signal.SIGKILL)  # its end is not what is measured; the engine goes with it
        server.communicate()


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
    }
    return report("startup", rows)


if __name__ == "__main__":
    sys.exit(main())
