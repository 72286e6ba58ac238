"""The application in the test's own process, over an engine that runs a rule."""

import asyncio
import contextlib
import threading

import httpx

from penstock.config.engine_config import EngineConfig
from penstock.fleet.link import EngineLink
from penstock.frontend.client import AsyncEngine
from penstock.frontend.recovery.journal import RETRY_SECONDS, Journal
from penstock.server.app import create_app
from penstock.server.config import ServerConfig
from tests.engine.rule_core import RULE_CORE


@contextlib.asynccontextmanager
async def open_app(model, core=RULE_CORE, config=None, journal=None, retry_seconds=RETRY_SECONDS, keys=None):
    """(http, engine, app): the application of a fresh engine, perhaps with a journal of this path."""
    engine_config = EngineConfig.from_options(model=str(model))
    kept = None if journal is None else Journal(journal, retry_seconds=retry_seconds)
    config = config or ServerConfig()
    link = EngineLink(engine_config, core)
    defaults = config.sampling_defaults
    engine = await AsyncEngine.start(engine_config, link, limits=config.queue, journal=kept, default_sampling=defaults)
    try:
        app = create_app(engine, config, keys)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as http:
            yield http, engine, app
    finally:
        await engine.close()


def with_app(talk, model, core=RULE_CORE, **options):
    """Run `talk(http, engine, app)` against the application of a fresh engine; `options` are `open_app`'s."""

    async def run():
        async with open_app(model, core, **options) as parts:
            return await asyncio.wait_for(talk(*parts), 120)

    return asyncio.run(run())


@contextlib.contextmanager
def shared_app(model, core=RULE_CORE, **options):
    """`with_app` but for the engine's start: a function that runs one `talk` after another, of several tests, against
    one engine. It lives in a thread that lasts as long, with which the engine would die.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    try:
        opened = open_app(model, core, **options)
        parts = run(opened.__aenter__())
        try:
            yield lambda talk: run(talk(*parts))
        finally:
            run(opened.__aexit__(None, None, None))
    finally:
        run(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
