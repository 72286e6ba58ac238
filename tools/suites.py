"""What `scripts/clients` and `scripts/agents` share: real servers, environments at pinned versions, and a table."""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PYTEST = "pytest==9.2.0"
READY = re.compile(r"serving (\S+) at (https?://\S+)")
LONGEST_SUITE = 1800.0
"""Seconds."""
Served = tuple[str, str]
"""A server's address, and its model's name."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a suite."""

    name: str
    version: str
    passed: int
    failed: int
    seconds: float

    @property
    def good(self) -> bool:
        return self.passed > 0 and self.failed == 0


HEADER = "| client | version | passed | failed | seconds |\n|---|---|---|---|---|"


def row(result: Result) -> str:
    """A line of the table."""
    return f"| {result.name} | {result.version} | {result.passed} | {result.failed} | {result.seconds:.0f} |"


@contextmanager
def running_server(key: str, *flags: str) -> Iterator[Served]:
    """A server, on the demo model by default: its address and its model's name."""
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", *flags]
    with tempfile.NamedTemporaryFile("w+", prefix="penstock-clients-", suffix=".log") as log:
        environment = {**os.environ, "PENSTOCK_API_KEY": key}
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            yield wait_for(process, Path(log.name))
        finally:
            process.terminate()
            process.wait(60)


def wait_for(process: "subprocess.Popen[bytes]", log: Path) -> Served:
    """The address and the model of a server that has begun to serve."""
    while True:
        found = READY.search(log.read_text())
        if found:
            model, url = found.groups()
            return url, model
        if process.poll() is not None:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.1)


def install(folder: Path, packages: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """An environment of Python that has these packages; made anew where it has others. Its Python."""
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join([PYTEST, *packages])
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"installing {', '.join(packages)} in {folder}", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", PYTEST, *packages], check=True)
    if unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *unwanted], check=True)
    done.write_text(wanted)
    return python


def version_of(python: Path, package: str) -> str:
    """The version of a package that is installed."""
    name = re.split(r"[\[=]", package)[0]
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def counts(report: Path) -> tuple[int, int]:
    """How many tests passed and how many did not, by a report of pytest's; (0, 1) if there is none."""
    if not report.exists():
        return 0, 1
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    tests, bad, skipped = (
        sum(int(suite.get(name, "0")) for name in names) for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return tests - bad - skipped, bad
