"""An application over several models, whose engines run a rule."""

import asyncio

import httpx

from penstock.config.engine_config import EngineConfig
from penstock.fleet.link import EngineLink
from penstock.fleet.model_broker import ModelBroker
from penstock.frontend.client import AsyncEngine
from penstock.frontend.limits import QueueLimits
from penstock.frontend.served_model import ServedModel
from penstock.frontend.served_models import ServedModels
from penstock.server.added_models import AddedModels
from penstock.server.app import create_app
from penstock.server.config import ServerConfig
from tests.engine.rule_core import RULE_CORE

ADMIN = ServerConfig(admin=True)


def with_models(talk, models, keys=None, config=ADMIN, added=None):
    """Run `talk(http, served)` against an application of these models. The first is loaded."""

    async def start(engine_config, beside):
        return await AsyncEngine.start(engine_config, EngineLink(engine_config, RULE_CORE), beside=beside)

    def plan(path, _num_others=0):
        return EngineConfig.from_options(model=str(path)), 10

    async def run():
        broker = ModelBroker(100, 3, 60.0)
        for name in models:
            broker.add_model(name, 10)
        each = [ServedModel(name, plan(path)[0]) for name, path in models.items()]
        served = ServedModels(each, broker, start, QueueLimits(), plan=plan)
        await served.open()
        try:
            app = create_app(served.main, config, keys, served=served, added=AddedModels(added))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://penstock", timeout=60) as http:
                await asyncio.wait_for(talk(http, served), 120)
        finally:
            await served.close()

    asyncio.run(run())


def complete(http, model, prompt=5, **options):
    body = {"model": model, "prompt": [prompt], "max_tokens": 3, **options}
    return http.post("/v1/completions", json=body)


async def names(http, **headers):
    cards = (await http.get("/v1/models", headers=headers)).json()["data"]
    tags = (await http.get("/api/tags", headers=headers)).json()["models"]
    assert [card["id"] for card in cards] == [tag["name"].removesuffix(":latest") for tag in tags]
    return [card["id"] for card in cards]
