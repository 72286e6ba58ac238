"""`penstock serve`: an engine process, an HTTP server, and their common end.

The engine is launched before anything else, so that it loads its model while this process imports the server.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from penstock.config import EngineConfig
from penstock.engine.link import EngineLink
from penstock.errors import ConfigError
from penstock.server.config import ServerConfig

if TYPE_CHECKING:
    from penstock.engine.client import AsyncEngine
    from penstock.server.http import HttpServer

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOSING_SECONDS = 5
"""How long connections may take to close after their requests were ended."""

logger = logging.getLogger("penstock.server")


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises:
        ConfigError: options, checkpoint or address are at fault; nothing runs any more.
        EngineDeadError: the engine could not start for another reason.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the event loop takes both over
    link: EngineLink | None = None
    try:
        listener = _bind(server_config)
        link = EngineLink(engine_config)
        return _run(link, engine_config, server_config, listener)
    except KeyboardInterrupt:
        return 0
    finally:
        if link is not None:
            link.destroy()


def _bind(config: ServerConfig) -> socket.socket:
    """Take the port at once: a server that cannot listen should not load a model first."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror}") from None
    return listener


def _run(link: EngineLink, engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> int:
    # Most of a second of imports, while the engine, launched already, loads its model.
    from penstock.engine.client import AsyncEngine
    from penstock.server.app import create_app
    from penstock.server.http import HttpServer

    logging.basicConfig(level=config.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")

    def make_server(engine: AsyncEngine) -> HttpServer:
        app = create_app(engine, config)
        return HttpServer(app, lambda: _announce(engine, app.state.serving.model_name, listener), CLOSING_SECONDS)

    return asyncio.run(_serve(AsyncEngine(engine_config, link), make_server, listener))


def _announce(engine: "AsyncEngine", model_name: str, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    logger.info("%s", engine.info.memory_plan)
    logger.info("serving %s at http://%s:%d", model_name, address, port)


async def _serve(
    engine: "AsyncEngine", make_server: Callable[["AsyncEngine"], "HttpServer"], listener: socket.socket
) -> int:
    stop = asyncio.Event()
    with _signals_to(stop.set):
        try:
            if await _unless(stop, engine.start()):
                await _answer_http(engine, make_server(engine), listener, stop)
        finally:
            await engine.close()
    return 0


async def _answer_http(
    engine: "AsyncEngine", server: "HttpServer", listener: socket.socket, stop: asyncio.Event
) -> None:
    """Serve until told to stop; then end every request, so that the connections close by themselves."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    engine.refuse("the server is shutting down")
    server.should_exit = True
    await serving


@contextlib.contextmanager
def _signals_to(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Do the work unless `stop` comes first; whether it was done."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        working.result()
        return True
    working.cancel()
    await asyncio.wait({working})
    return False
