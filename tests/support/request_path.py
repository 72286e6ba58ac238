"""Which of Penstock's files one chat request runs through: in the server's process and in the engine's.

    python -m tests.support.request_path     the files, in the order of first use

A model is recorded once, when the engine starts, and its Python is not run in a step: that recording counts, too.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType

import httpx

import penstock
from penstock.config.engine_config import EngineConfig
from penstock.fleet.link import EngineLink
from penstock.frontend.client import AsyncEngine
from penstock.system.start import Start

ROOT = Path(penstock.__file__).parent
LISTING = "PENSTOCK_REQUEST_PATH"
"""Environment variable: the file in which a traced process notes what it runs."""
BODY = {"messages": [{"role": "user", "content": "What is 37 + 58?"}], "max_tokens": 4, "stream": True}


class FileTrace:
    """Notes each file of Penstock in which a function of this thread is called.

    `within` is the name of a function: only what that one calls is noted, and only once. `after`: nothing is noted
    before so many calls of `add_request`. The engine's end is no part of a request.
    """

    def __init__(self, listing: Path, within: str | None = None, after: int = 0) -> None:
        self._listing = listing
        self._within = within
        self._after = after
        self._seen: set[str] = set()

    def __enter__(self) -> "FileTrace":
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
        path = frame.f_code.co_filename
        is_closing = event == "call" and path.endswith("engine/core.py") and frame.f_code.co_name == "close"
        if is_closing or (event == "return" and frame.f_code.co_name == self._within):
            sys.setprofile(None)
            return
        if event != "call" or path in self._seen or frame.f_code.co_name == "<module>":
            return
        self._seen.add(path)
        if path.startswith(str(ROOT)):
            with self._listing.open("a") as file:
                file.write(f"{Path(path).relative_to(ROOT)}\n")


def build_traced(config: EngineConfig, start: Start) -> object:
    """An engine whose process notes what the recording of its model runs, and then every step."""
    from penstock.engine.build import build_engine

    listing = Path(os.environ[LISTING])
    with FileTrace(listing, within="make_forward"):
        core = build_engine(config, start=start)
    FileTrace(listing, after=2).__enter__()  # what is done once a process is no part of the path
    return core


async def _ask(model: Path | None, listing: Path) -> None:
    from penstock.server.app import create_app
    from penstock.server.config import ServerConfig

    config = EngineConfig.from_options(model=None if model is None else str(model))
    engine = await AsyncEngine.start(config, EngineLink(config, "tests.support.request_path:build_traced"))
    try:
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as http:
            body = BODY | {"model": engine.info.model_name}
            await http.post("/v1/chat/completions", json=body)
            with FileTrace(listing):
                answer = await http.post("/v1/chat/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    finally:
        await engine.close()


def request_path(model: Path | None = None) -> list[str]:
    """The files, by their paths within the package: the engine's, then the server's."""
    with tempfile.TemporaryDirectory() as folder:
        listing, engine_listing = Path(folder, "server"), Path(folder, "engine")
        os.environ[LISTING] = str(engine_listing)
        try:
            asyncio.run(_ask(model, listing))
        finally:
            del os.environ[LISTING]
        return list(dict.fromkeys([*listing.read_text().split(), *engine_listing.read_text().split()]))


def lines_of(paths: list[str]) -> int:
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths)


if __name__ == "__main__":
    found = request_path()
    print("\n".join(found))
    print(f"{len(found)} files, {lines_of(found)} lines")
