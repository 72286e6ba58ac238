"""All parts of `tools/gpu_day.py` on the CPU: `python -m tests.tools.gpu_forks OUT`.

Each runs in a fork of one process, where torch and Triton are imported once and not 17 times.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

from tools.gpu import child
from tools.gpu.parts import PARTS, Part
from tools.gpu.runner import Runner


class Fork:
    """A part in a process of its own, with what `Runner` needs of `subprocess.Popen`."""

    def __init__(self, part: Part, result: Path, environment: dict[str, str], output: IO[str]) -> None:
        self._process = get_context("fork").Process(target=self._run, args=(part, result, environment, output))
        self._process.start()

    @staticmethod
    def _run(part: Part, result: Path, environment: dict[str, str], output: IO[str]) -> None:
        os.environ.update(environment)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
        child.main(part.function, "cpu", str(result))

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", seconds or 0.0)
        return self._process.exitcode


class ForkingRunner(Runner):
    def _start(self, *started: Any) -> Any:
        return Fork(*started)


def main(out: str) -> int:
    runner = ForkingRunner(Path(out), "cpu", 570.0)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(runner._environment("none", Path(scratch)))  # Triton's, before it is imported
        for part in PARTS:
            if not part.needs_gpu:
                importlib.import_module(part.function.partition(":")[0])
        from transformers import LlamaForCausalLM  # noqa: F401 two parts use it

        return runner.run(PARTS)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
