"""Figures of one chat request: the functions, lines, classes and files that it runs through, and the size of the code.

    python -m tools.request_figures             a table; goals are in docs/architecture.md
    python -m tools.request_figures --files     and the files, in the order of first use

The request is the third one of a server, streamed, with the demo model. A model is recorded once, when the engine
starts, and its Python is not run in a step: that recording counts, too. Threads beside the event loop and beside the
engine's loop do not count, nor does the look, twice a second, for an engine that hangs.
"""

import argparse
import ast
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import httpx

import penstock
from penstock.config.engine_config import EngineConfig
from penstock.fleet.link import EngineLink
from penstock.frontend.client import AsyncEngine
from penstock.system.start import Start

ROOT = Path(penstock.__file__).parent
LISTING = "PENSTOCK_REQUEST_FIGURES"
"""Environment variable: the file in which a traced engine process notes what it runs."""
BODY = {"messages": [{"role": "user", "content": "What is 37 + 58?"}], "max_tokens": 4, "stream": True}
MORE_TOKENS = 32
CARRIERS = {
    *("ChatBody", "Conversation", "Prepared", "Accepted", "SamplingParams", "ResolvedParams"),
    *("Request", "OpenRequest", "Add", "Call", "Parsers"),
}
"""Types of objects that carry a body, or what it became, on its way from the route to the engine."""
WATCH = "_await_hang"
"""In `fleet/replica.py`: looks twice a second for an engine that hangs. It is in few traces, and part of no request."""


@dataclass(frozen=True, slots=True, order=True)
class Function:
    """A function that was executed."""

    path: str
    """Within the package."""
    line: int
    name: str


class Trace:
    """Notes the functions of Penstock that this thread calls.

    `within` is the name of a function: only what that one calls is noted, and only once. `after`: nothing is noted
    before so many calls of `add_request`. The engine's end is no part of a request, nor is what `WATCH` calls.
    """

    def __init__(self, listing: Path, within: str | None = None, after: int = 0) -> None:
        self._listing = listing
        self._within = within
        self._after = after
        self._seen: set[CodeType] = set()
        self._is_watch = False
        self.num_calls = 0
        self.names: set[str] = set()
        """Parameters that were given an object of `CARRIERS`."""

    def __enter__(self) -> "Trace":
        sys.setprofile(self._wait if self._within or self._after else self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _wait(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code.co_name == "add_request" and frame.f_code.co_filename.endswith("core/scheduler.py"):
            self._after -= 1
        if frame.f_code.co_name == self._within or (not self._within and not self._after):
            sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = code.co_filename
        is_closing = event == "call" and path.endswith("engine/core.py") and code.co_name == "close"
        if is_closing or (event == "return" and code.co_name == self._within):
            sys.setprofile(None)
            return
        if code.co_name == WATCH and event in ("call", "return"):  # a coroutine: it is called to go on, returns to wait
            self._is_watch = event == "call"
        if self._is_watch or event != "call" or code.co_name.startswith("<") or not path.startswith(str(ROOT)):
            return
        self.num_calls += 1
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.names.update(n for n in names if n != "self" and type(frame.f_locals.get(n)).__name__ in CARRIERS)
        if code not in self._seen:
            self._seen.add(code)
            with self._listing.open("a") as file:
                file.write(f"{Path(path).relative_to(ROOT)} {code.co_firstlineno} {code.co_name}\n")


def build_traced(config: EngineConfig, start: Start) -> object:
    """An engine whose process notes what the recording of its model runs, and then every step."""
    from penstock.engine.build import build_engine

    listing = Path(os.environ[LISTING])
    with Trace(listing, within="make_forward"):
        core = build_engine(config, start=start)
    Trace(listing, after=3).__enter__()  # what is done once a process is no part of the path
    return core


@dataclass(frozen=True, slots=True)
class Figures:
    """What one chat request ran."""

    server: list[Function]
    engine: list[Function]
    names: list[str]
    """Names of parameters that carry the body, or what it became."""
    calls_per_token: float
    """Calls of functions in the server process for each streamed token."""

    @property
    def functions(self) -> set[Function]:
        return {*self.server, *self.engine}

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(function.path for function in (*self.server, *self.engine)))


def figures(model: Path | None = None) -> Figures:
    """Serve a chat request and return its figures; None: of the demo model."""
    with tempfile.TemporaryDirectory() as folder:
        listing, engine_listing = Path(folder, "server"), Path(folder, "engine")
        os.environ[LISTING] = str(engine_listing)
        try:
            names, calls_per_token = asyncio.run(_ask(model, listing))
        finally:
            del os.environ[LISTING]
        return Figures(_functions(listing), _functions(engine_listing), sorted(names), calls_per_token)


async def _ask(model: Path | None, listing: Path) -> tuple[set[str], float]:
    from penstock.server.app import create_app
    from penstock.server.config import ServerConfig

    config = EngineConfig.from_options(model=None if model is None else str(model))
    engine = await AsyncEngine.start(config, EngineLink(config, "tools.request_figures:build_traced"))
    try:
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as http:
            body = BODY | {"model": engine.info.model_name, "ignore_eos": True}
            await http.post("/v1/chat/completions", json=body)
            with Trace(Path(os.devnull)) as longer:
                await http.post("/v1/chat/completions", json=body | {"max_tokens": 4 + MORE_TOKENS})
            with Trace(listing) as trace:
                answer = await http.post("/v1/chat/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text
            return trace.names, (longer.num_calls - trace.num_calls) / MORE_TOKENS
    finally:
        await engine.close()


def _functions(listing: Path) -> list[Function]:
    rows = (line.split() for line in listing.read_text().splitlines())
    return [Function(path, int(line), name) for path, line, name in rows]


# ── source ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(None)
def _definitions(path: str) -> dict[int, tuple[int, str | None]]:
    """The last line of each function in a file, and its class, by its first line."""
    found: dict[int, tuple[int, str | None]] = {}

    def visit(node: ast.AST, class_name: str | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found[first] = (child.end_lineno or first, class_name)
            visit(child, child.name if isinstance(child, ast.ClassDef) else class_name)

    visit(ast.parse((ROOT / path).read_text()), None)
    return found


@lru_cache(None)
def _comments(path: str) -> frozenset[int]:
    """The lines of a file that are a comment and nothing else: more reasons make no way longer."""
    lines = (ROOT / path).read_text().splitlines()
    return frozenset(number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#"))


def lines_of(functions: Iterable[Function]) -> int:
    """Lines of source of these functions, docstrings included, comments not, each line once."""
    lines: set[tuple[str, int]] = set()
    for function in functions:
        last, _ = _definitions(function.path).get(function.line, (function.line, None))
        lines.update((function.path, line) for line in range(function.line, last + 1))
    return sum(line not in _comments(path) for path, line in lines)


def classes_of(functions: Iterable[Function]) -> set[tuple[str, str]]:
    """Classes that these functions are methods of."""
    owners = ((function.path, _definitions(function.path).get(function.line, (0, None))[1]) for function in functions)
    return {(path, name) for path, name in owners if name is not None}


def _imports(path: Path) -> set[str]:
    """The package's modules that a file imports, in functions too, but not for type checking alone."""
    tree = ast.parse(path.read_text())
    typing_only = [
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for node in ast.walk(branch)
    ]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in typing_only:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def circles() -> list[tuple[str, str]]:
    """Pairs of modules that import each other."""
    modules = {".".join(["penstock", *path.relative_to(ROOT).with_suffix("").parts]): path for path in _sources()}
    imports = {name: _imports(path) & modules.keys() for name, path in modules.items()}
    return sorted((a, b) for a in imports for b in imports[a] if a < b and a in imports[b])


def _sources() -> Iterator[Path]:
    return ROOT.rglob("*.py")


def _num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print the files, too")
    found = figures()
    if parser.parse_args().files:
        print("\n".join(found.files))
    for name, functions in (("server process", found.server), ("engine", found.engine)):
        print(f"{name}: {len(functions)} functions, {lines_of(functions)} lines")
    rooms = Counter(function.path.partition("/")[0] for function in found.functions)
    for room, count in rooms.most_common():
        lines = lines_of(function for function in found.functions if function.path.partition("/")[0] == room)
        print(f"  {room}: {count} functions, {lines} lines")
    functions, classes = found.functions, classes_of(found.functions)
    counts = f"{len(functions)} functions, {lines_of(functions)} lines, {len(classes)} classes"
    print(f"all: {counts}, {len(found.files)} files")
    print(f"names of the body on its way: {len(found.names)}: {', '.join(found.names)}")
    print(f"calls for a streamed token in the server process: {found.calls_per_token:.0f}")
    csrc = ROOT.parents[1] / "csrc"
    print(f"src: {_num_lines(_sources())} lines, csrc: {_num_lines(p for p in csrc.rglob('*.*') if p.is_file())} lines")
    print(f"import circles of two files: {len(circles())} {circles() or ''}")


if __name__ == "__main__":
    main()
