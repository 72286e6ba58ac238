"""Several models, each an engine that runs a rule: what happens when one cannot be loaded, or is lost."""

import asyncio
import math
import os
import signal
import types
from dataclasses import replace

import pytest

from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    QueueTimeoutError,
    ShuttingDownError,
)
from penstock.fleet.link import EngineLink
from penstock.fleet.model_broker import ModelBroker
from penstock.fleet.replica import RestartPolicy
from penstock.frontend.client import AsyncEngine
from penstock.frontend.limits import QueueLimits
from penstock.frontend.served_model import ServedModel
from penstock.frontend.served_models import ServedModels
from tests.engine.rule_core import RULE_CORE, SLOW


def serve(folders, talk, *, max_loaded=1, limits=None):
    """Run `talk(models)` with a model of each of these folders, loaded as they are used."""

    limits = limits or QueueLimits()

    async def start(config, beside):
        restarts = RestartPolicy(first_pause=0.0, max_failed_starts=1)
        link = EngineLink(config, RULE_CORE)
        return await AsyncEngine.start(config, link, limits=limits, restarts=restarts, beside=beside)

    async def run():
        broker = ModelBroker(100, max_loaded, 60.0)
        for folder in folders:
            folder.mkdir(exist_ok=True)
            broker.add_model(folder.name, 10)
        models = ServedModels(
            [ServedModel(one.name, EngineConfig.from_options(model=str(one))) for one in folders],
            broker,
            start,
            limits,
            plan=lambda path, num_others: (EngineConfig.from_options(model=path), 10),
        )
        await models.open()
        try:
            await asyncio.wait_for(talk(models), 60)
        finally:
            await models.close()

    asyncio.run(run())


async def answer(engine, request_id, num_tokens=3, prompt=5):
    accepted = engine.accept_request([prompt], SamplingParams(max_tokens=num_tokens), request_id=request_id)
    with engine.open([accepted], stream=False) as request_stream:
        (output,) = await request_stream.results()
    return output.outputs[0].token_ids


def test_a_model_that_cannot_be_loaded_fails_who_waits_and_is_tried_again(tmp_path):
    bad, good = tmp_path / "bad", tmp_path / "good"

    async def talk(models):
        (bad / "out-of-order").touch()
        waiting = [asyncio.ensure_future(models.use("bad", None)) for _ in range(2)]
        await asyncio.wait(waiting)
        for use in waiting:
            assert isinstance(use.exception(), EngineError)
            assert "'bad' cannot be loaded" in str(use.exception())
        assert models.status("bad").error == "RuntimeError: the core fell over"
        assert await models.health_error() is None
        (bad / "out-of-order").unlink()
        use = await models.use("bad", None)
        assert await answer(use.engine, "a") == [6, 7, 8]
        assert models.status("bad").error is None
        use.end()

    serve([good, bad], talk)


def test_a_model_whose_engine_cannot_be_kept_alive_is_loaded_again_when_it_is_used(tmp_path):
    first, other = tmp_path / "first", tmp_path / "other"

    async def talk(models):
        use = await models.use("other", None)
        lost = asyncio.ensure_future(answer(use.engine, "lost", num_tokens=400, prompt=SLOW))
        await asyncio.sleep(0.05)
        (other / "out-of-order").touch()
        os.kill(use.engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await lost
        while models.status("other").state != "unloaded":
            await asyncio.sleep(0.01)
        use.end()  # late: its model is gone
        assert "cannot be started again" in models.status("other").error
        assert await answer((await models.use("first", None)).engine, "b") == [6, 7, 8]
        (other / "out-of-order").unlink()
        again = await models.use("other", None)
        assert again.engine is use.engine
        assert await answer(again.engine, "c") == [6, 7, 8]

    serve([first, other], talk, max_loaded=2)


def test_engines_of_all_models_have_numbers_of_their_own_and_keep_them(tmp_path):
    async def talk(models):
        for name in ("b", "a", "b"):
            (await models.use(name, None)).end()
        assert [state.replica for state in models.states()] == [0, 1]
        assert [state.state for state in models.states()] == ["unloaded", "up"]

    serve([tmp_path / "a", tmp_path / "b"], talk)


def test_who_waits_for_a_model_leaves_when_time_is_up_and_no_more_wait_than_may_queue(tmp_path):
    async def talk(models):
        use = await models.use("a", None)
        with pytest.raises(QueueTimeoutError):
            await models.use("b", 0.01)
        waiting = asyncio.ensure_future(models.use("b", None))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await models.use("b", None)
        use.end()
        (await waiting).end()

    serve([tmp_path / "a", tmp_path / "b"], talk, limits=replace(QueueLimits(), max_queued=1))


def test_a_load_whose_caller_has_left_stays_in_use_while_its_resumed_requests_run(tmp_path):
    async def talk(models):
        resumed = []
        start = models.loads.start_engine

        async def start_and_resume(config, beside):
            engine = await start(config, beside)
            resumed.append(asyncio.ensure_future(answer(engine, "resumed", num_tokens=20, prompt=SLOW)))
            await asyncio.sleep(0)
            return engine

        models.loads.start_engine = start_and_resume
        caller = asyncio.ensure_future(models.use("b", None))
        while models.status("b").state != "loading":
            await asyncio.sleep(0.001)
        caller.cancel()
        while models.status("b").state != "loaded":
            await asyncio.sleep(0.01)
        use = await models.use("c", None)  # which fits after the request of b
        assert len(await resumed[0]) == 20
        assert await answer(use.engine, "c") == [6, 7, 8]

    serve([tmp_path / name for name in "abc"], talk)


def test_the_models_of_a_context_stay_loaded(tmp_path):
    async def talk(models):
        with models.kept_loaded() as fleets:
            assert len(fleets) == 1
            with pytest.raises(QueueTimeoutError):
                await models.use("b", 0.05)
        (await models.use("b", None)).end()

    serve([tmp_path / "a", tmp_path / "b"], talk)


def test_a_server_that_shuts_down_lets_nobody_wait_for_a_model(tmp_path):
    async def talk(models):
        await models.use("a", None)
        waiting = asyncio.ensure_future(models.use("b", None))
        await asyncio.sleep(0)
        models.refuse(ShuttingDownError("the end", 5.0))
        with pytest.raises(ShuttingDownError):
            await waiting
        with pytest.raises(ShuttingDownError):
            await models.use("a", None)

    serve([tmp_path / "a", tmp_path / "b"], talk)


def test_a_load_without_progress_ends_with_its_reason_and_tells_who_waits(tmp_path):
    good, stuck = tmp_path / "good", tmp_path / "stuck"

    async def talk(models):
        (stuck / "stuck").touch()
        models.loads.load_timeout = 0.3
        waiting = asyncio.ensure_future(models.use("stuck", None))
        while models.status("stuck").state != "loading":
            await asyncio.sleep(0.001)
        assert models.status("stuck").stage == "starting"
        with pytest.raises(EngineError, match=r"made no progress for 0.3 s, in the stage 'starting' .*--load-timeout"):
            await waiting
        assert models.status("stuck").state == "unloaded"
        (stuck / "stuck").unlink()
        models.loads.load_timeout = math.inf
        assert await answer((await models.use("stuck", None)).engine, "a") == [6, 7, 8]

    serve([good, stuck], talk, max_loaded=2)


def test_requests_end_with_the_model_that_was_replaced_and_new_ones_get_the_new_one(tmp_path):
    first, new = tmp_path / "first", tmp_path / "new"

    async def talk(models):
        use = await models.use("first", None)
        old = asyncio.ensure_future(answer(use.engine, "old", num_tokens=60, prompt=SLOW))
        await asyncio.sleep(0.05)
        waiting = asyncio.ensure_future(models.use("other", None))
        await asyncio.sleep(0)
        behind = asyncio.ensure_future(models.use("first", None))
        await asyncio.sleep(0)
        models.add_model("first", str(new))
        assert [model.name for model in models.served] == ["first", "other"]
        assert models.status("first").stage == "waiting"
        assert len(await old) == 60
        use.end()
        (await waiting).end()
        again = await behind
        assert again.engine.info.model_path == str(new)
        assert await answer(again.engine, "new") == [6, 7, 8]
        assert list(models.models) == ["first", "other"]
        assert use.engine.given_up.is_set() is False
        again.end()

    new.mkdir()
    serve([first, tmp_path / "other"], talk)


def test_the_engine_of_a_replaced_model_is_not_started_again_with_other_files(tmp_path):
    first = tmp_path / "first"

    async def talk(models):
        use = await models.use("first", None)
        old = asyncio.ensure_future(answer(use.engine, "old", num_tokens=400, prompt=SLOW))
        await asyncio.sleep(0.05)
        models.add_model("first", str(first))
        os.kill(use.engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="was replaced or removed"):
            await old
        use.end()
        assert await answer((await models.use("first", None)).engine, "new") == [6, 7, 8]

    serve([first], talk)


def test_a_removed_model_is_unloaded_after_its_requests(tmp_path):
    async def talk(models):
        models.add_model("b", str(tmp_path / "a"))
        use = await models.use("b", None)
        last = asyncio.ensure_future(answer(use.engine, "last", num_tokens=20, prompt=SLOW))
        models.remove_model("b")
        with pytest.raises(InvalidRequestError, match="is the only one"):
            models.remove_model("a")
        assert len(await last) == 20
        use.end()
        while len(models.models) > 1:
            await asyncio.sleep(0.01)
        assert use.engine.fleet.is_asleep
        models.add_model("b", str(tmp_path / "a"))
        held = await models.use("a", None)
        waiting = asyncio.ensure_future(models.use("b", None))
        await asyncio.sleep(0)
        models.remove_model("b")
        with pytest.raises(ModelNotFoundError):
            await waiting
        with pytest.raises(ModelNotFoundError):  # two callers at once
            models.remove_model("b")
        held.end()

    serve([tmp_path / "a"], talk)


def test_a_load_after_a_download_has_the_time_limit_of_a_load(tmp_path):
    async def talk(models):
        (await models.use("b", None)).end()
        models.models["b"].is_downloading = True  # its first load, which ended before it told of any weights
        (await models.use("a", None)).end()
        (tmp_path / "b" / "stuck").touch()
        models.loads.load_timeout = 0.3
        with pytest.raises(EngineError, match="made no progress"):
            await models.use("b", 10.0)

    serve([tmp_path / "a", tmp_path / "b"], talk)


def test_a_call_is_looked_up_while_a_model_is_added(tmp_path):
    async def find(_name):
        return [types.SimpleNamespace(record=types.SimpleNamespace(model="another"))]

    async def talk(models):
        models._journal = types.SimpleNamespace(find=find)
        looking = asyncio.ensure_future(models.engine_of_call("call"))
        await asyncio.sleep(0)  # it compares the first model
        models.add_model("b", str(tmp_path / "a"))
        assert await looking is models.main
        models._journal = None

    serve([tmp_path / "a"], talk)


def test_the_load_of_a_removed_model_ends_and_others_are_loaded(tmp_path):
    async def talk(models):
        (tmp_path / "b" / "stuck").touch()
        waiting = asyncio.ensure_future(models.use("b", None))
        while models.status("b").state != "loading":
            await asyncio.sleep(0.001)
        models.remove_model("b")
        with pytest.raises(ModelNotFoundError):
            await waiting
        (await models.use("c", 20.0)).end()
        assert list(models.models) == ["a", "c"]

    serve([tmp_path / name for name in "abc"], talk, max_loaded=2)
