"""The application in the test's own process, over an engine that runs a rule."""

import asyncio

import httpx

from penstock.config import EngineConfig
from penstock.frontend.client import AsyncEngine
from penstock.frontend.link import EngineLink
from penstock.frontend.recovery.journal import RETRY_SECONDS, Journal
from penstock.server.app import create_app
from penstock.server.config import ServerConfig
from tests.engine.rule_core import RULE_CORE


def with_app(talk, model, core=RULE_CORE, config=None, journal=None, retry_seconds=RETRY_SECONDS, keys=None):
    """Run `talk(http, engine, app)` against the application of a fresh engine, perhaps with a journal of this path."""

    async def run():
        engine_config = EngineConfig.from_options(model=str(model))
        kept = None if journal is None else Journal(journal, retry_seconds=retry_seconds)
        engine = await AsyncEngine.start(engine_config, EngineLink(engine_config, core), journal=kept)
        try:
            app = create_app(engine, config or ServerConfig(), keys)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as http:
                return await asyncio.wait_for(talk(http, engine, app), 120)
        finally:
            await engine.close()

    return asyncio.run(run())
