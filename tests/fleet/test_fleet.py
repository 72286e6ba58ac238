"""Several engine processes behind one `AsyncEngine`, which run a rule instead of a model."""

import asyncio
import os
import signal

import pytest

from penstock.api.request import FinishReason
from penstock.api.sampling_params import SamplingParams
from penstock.config.engine_config import EngineConfig
from penstock.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueTimeoutError
from penstock.fleet import fleet as fleet_module
from penstock.fleet import link
from penstock.fleet import replica as replica_module
from penstock.fleet.link import EngineLink
from penstock.fleet.replica import DEFAULT_RESTARTS, RestartPolicy
from penstock.frontend.client import AsyncEngine
from penstock.frontend.recovery.journal import Journal
from tests.engine.rule_core import CRASH, HANG, RULE_CORE, SLOW
from tests.frontend.test_client import drain, open_one, tokens_of, two_steps, until


def with_fleet(talk, model, kinds=(EngineLink, EngineLink), step_deadline=30.0, restarts=DEFAULT_RESTARTS, **options):
    """Run `talk(engine)` against fresh engines and leave nothing behind."""

    async def run():
        config = EngineConfig.from_options(model=str(model), **options)
        links = [kind(config, RULE_CORE) for kind in kinds]
        engine = await AsyncEngine.start(config, links, step_deadline, restarts=restarts, router="least-loaded")
        try:
            return await asyncio.wait_for(talk(engine), 120)
        finally:
            await engine.close()
            assert not any(link._process.runs for link in links)

    return asyncio.run(run())


def replica_of(engine, request_id):
    return engine.open_requests.find(request_id).replica


def pid_of(engine, replica):
    return engine.fleet.replicas[replica].pid


async def several_steps(request_stream):
    """Wait until none of its answers is under any suspicion."""
    while min(len(answer.token_ids) for answer in request_stream.snapshot()[0].outputs) < 3:
        await request_stream.__anext__()


def slow_tokens(count):
    return [(SLOW + 1 + i) % 1000 for i in range(count)]


def test_requests_are_shared_out_and_answered(tmp_path):
    async def talk(engine):
        streams = [open_one(engine, SLOW, request_id=str(i), max_tokens=5) for i in range(4)]
        assert [replica_of(engine, str(i)) for i in range(4)] == [0, 1, 0, 1]
        assert [tokens_of(await drain(stream)) for stream in streams] == [slow_tokens(5)] * 4
        steps = engine.metrics.replica_steps.values
        assert min(steps["0"], steps["1"]) >= 5
        assert engine.metrics.steps.values[""] == steps["0"] + steps["1"]
        assert engine.info.max_num_seqs == 64
        assert engine.admission._answers.most == 2 * 64 + engine._limits.max_queued

    with_fleet(talk, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_streams_of_a_killed_engine_go_on_at_once_and_it_comes_back(tmp_path, number):
    async def talk(engine):
        streams = {name: open_one(engine, SLOW, request_id=name, n=2, max_tokens=30) for name in "abcd"}
        await asyncio.gather(*(several_steps(stream) for stream in streams.values()))
        os.kill(pid_of(engine, 1), number)
        await until(lambda: replica_of(engine, "b") == 0)
        assert engine.fleet.replicas[1].down, "they did not wait for its successor"
        assert engine.metrics.fleet_moved.values[""] == 2
        assert await engine.health_error() is None
        assert not engine.restarting
        for stream in streams.values():
            results = await stream.results()
            assert [answer.token_ids for answer in results[0].outputs] == [slow_tokens(30)] * 2
        await until(lambda: engine.fleet.replicas[1].down is None)
        again = [open_one(engine, 10, request_id=f"again {i}") for i in range(2)]
        assert {replica_of(engine, "again 0"), replica_of(engine, "again 1")} == {0, 1}
        assert [tokens_of(await drain(one)) for one in again] == [[11, 12, 13, 14]] * 2
        assert engine.metrics.replica_restarts.values == {"0": 0, "1": 1}

    with_fleet(talk, tmp_path)


def test_the_streams_of_a_hanging_engine_go_on(tmp_path):
    async def talk(engine):
        other = open_one(engine, SLOW, request_id="other", max_tokens=60)
        await two_steps(other)
        hanging = open_one(engine, HANG, request_id="hangs")
        joined = replica_of(engine, "hangs")
        assert joined != replica_of(engine, "other")
        (end,) = await drain(hanging)
        assert end.finish_reason is FinishReason.ERROR
        assert (await drain(other))[-1].finish_reason is FinishReason.LENGTH
        (life,) = engine.history.find("hangs")
        assert {replica for _, replica in life.replicas} == {joined}, "a poisonous request meets one engine only"

    with_fleet(talk, tmp_path, step_deadline=1.0)


def test_a_poisonous_request_meets_one_engine_and_is_ended(tmp_path, capfd):
    async def talk(engine):
        others = [open_one(engine, SLOW, request_id=str(i), max_tokens=60) for i in range(2)]
        await asyncio.gather(*(two_steps(one) for one in others))
        (end,) = await drain(open_one(engine, CRASH, request_id="poison"))
        assert "a step fell over" in end.error
        (life,) = engine.history.find("poison")
        assert len({replica for _, replica in life.replicas}) == 1
        assert sum(engine.metrics.replica_restarts.values.values()) == 2
        for one in others:
            assert (await drain(one))[-1].finish_reason is FinishReason.LENGTH

    with_fleet(talk, tmp_path)


class LinkWithoutAnother(EngineLink):
    """Its engine's successor finds no machine, as in a cluster that has lost one."""

    def again(self, model=None, revision=None):
        return type(self)(self._config, self._core)

    async def placed(self):
        await asyncio.Event().wait()


class LostLink(LinkWithoutAnother):
    """Its engine's machine was lost, and none comes in its place."""

    was_lost = True


@pytest.mark.parametrize("kind", [LinkWithoutAnother, LostLink])
def test_whoever_is_under_suspicion_does_not_wait_for_a_machine_that_does_not_come(tmp_path, monkeypatch, kind):
    if kind is LinkWithoutAnother:
        monkeypatch.setattr(replica_module, "restart_patience", lambda first_start: 0.5)

    async def talk(engine):
        others = [open_one(engine, SLOW, request_id=str(i), max_tokens=200) for i in range(2)]
        await asyncio.gather(*(several_steps(one) for one in others))
        doubted = open_one(engine, SLOW, request_id="doubted", max_tokens=5)
        assert replica_of(engine, "doubted") == 0
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        assert tokens_of(await drain(doubted)) == slow_tokens(5)
        assert engine.fleet.replicas[0].down
        assert engine.metrics.fleet_moved.values[""] == 2
        for one in others:
            assert (await one.results())[0].outputs[0].token_ids == slow_tokens(200)

    with_fleet(talk, tmp_path, kinds=(kind, EngineLink))


class StuckLink(EngineLink):
    """Its engine survives SIGKILL, as one does that is stuck in a driver."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._process.kill = lambda: None

    def again(self, model=None, revision=None):
        return EngineLink(self._config, self._core)


def test_the_streams_of_an_engine_that_cannot_be_killed_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(link, "KILL_SECONDS", 0.2)

    async def talk(engine):
        streams = [open_one(engine, SLOW, request_id=str(i), max_tokens=100) for i in range(2)]
        await asyncio.gather(*(several_steps(stream) for stream in streams))
        assert replica_of(engine, "0") == 0
        stuck = engine.fleet.replicas[0]._link
        hanging = open_one(engine, HANG, request_id="hangs")
        assert replica_of(engine, "hangs") == 0
        for stream in streams:
            assert (await stream.results())[0].outputs[0].token_ids == slow_tokens(100)
        (end,) = await drain(hanging)
        assert end.finish_reason is FinishReason.ERROR
        await until(lambda: engine.fleet.replicas[0].down is None)
        await until(lambda: not stuck._process.runs)  # by the end of its standard input, as it only sleeps

    with_fleet(talk, tmp_path, kinds=(StuckLink, EngineLink), step_deadline=1.0)


def test_an_added_engine_takes_over_from_one_that_does_not_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_module, "restart_patience", lambda first_start: 0.0)

    async def talk(engine):
        begun = open_one(engine, SLOW, request_id="begun", max_tokens=50)
        await several_steps(begun)
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        await until(lambda: engine.fleet.replicas[0].down)
        await engine.fleet.grow()
        assert (await begun.results())[0].outputs[0].token_ids == slow_tokens(50)
        assert engine.fleet.replicas[0].down

    with_fleet(talk, tmp_path, kinds=(LinkWithoutAnother,))


def test_a_request_waiting_for_a_machine_that_does_not_come_expires(tmp_path):
    async def talk(engine):
        accepted = engine.accept_request([HANG], SamplingParams(max_tokens=4), request_id="late")
        late = engine.open([accepted], stream=False, queue_timeout=0.5)
        await until(lambda: engine.open_requests.find("late").is_in_engine)
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        with pytest.raises(QueueTimeoutError, match="waited"):
            await late.results()
        assert engine.fleet.replicas[0].status.num_requests == 0

    with_fleet(talk, tmp_path, kinds=(LinkWithoutAnother,))


def test_a_drained_engine_that_dies_is_gone_once_its_requests_have_moved(tmp_path):
    async def talk(engine):
        os.kill(pid_of(engine, 1), signal.SIGKILL)
        await until(lambda: engine.fleet.replicas[1].down)
        begun = open_one(engine, SLOW, request_id="begun", max_tokens=400)
        await several_steps(begun)
        retiring = asyncio.ensure_future(engine.fleet.retire(0))  # the request ends there, as no other engine is up
        await until(lambda: engine.fleet.replicas[1].down is None)
        assert replica_of(engine, "begun") == 0
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        await retiring
        assert replica_of(engine, "begun") == 1
        begun.abort()

    with_fleet(talk, tmp_path, kinds=(LinkWithoutAnother, EngineLink))


def test_all_engines_down_is_trouble_and_what_comes_meanwhile_waits(tmp_path):
    async def talk(engine):
        for replica in (0, 1):
            os.kill(pid_of(engine, replica), signal.SIGKILL)
        await until(lambda: engine.restarting)
        assert "restarted" in await engine.health_error()
        assert tokens_of(await drain(open_one(engine, 10))) == [11, 12, 13, 14]

    with_fleet(talk, tmp_path)


def test_an_engine_that_cannot_be_started_again_leaves_its_requests_to_the_others(tmp_path, capfd):
    async def talk(engine):
        streams = [open_one(engine, SLOW, request_id=str(i), max_tokens=40) for i in range(2)]
        await streams[0].__anext__()
        (tmp_path / "out-of-order").touch()
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        await until(lambda: list(engine.fleet.replicas) == [1])
        for stream in streams:
            assert (await stream.results())[0].outputs[0].token_ids == slow_tokens(40)
        assert not engine.given_up.is_set()
        assert engine.metrics.replica_up.values == {"1": 1}
        os.kill(pid_of(engine, 1), signal.SIGKILL)
        await engine.given_up.wait()

    with_fleet(talk, tmp_path, restarts=RestartPolicy(first_pause=0.0, max_failed_starts=2))


def test_engines_are_added_and_drained_while_streams_go_on(tmp_path):
    async def talk(engine):
        fleet = engine.fleet
        streams = [open_one(engine, SLOW, request_id=str(i), max_tokens=50) for i in range(3)]
        await asyncio.gather(*(stream.__anext__() for stream in streams))
        assert {replica_of(engine, str(i)) for i in range(3)} == {0}
        with pytest.raises(InvalidRequestError, match="the only one"):
            await fleet.retire(0)
        replica = await fleet.grow()
        assert replica.number == 1
        retiring = asyncio.ensure_future(fleet.retire(0))
        await asyncio.sleep(0)
        assert [state.replica for state in fleet.states()] == [1], "all of it went on elsewhere at once"
        assert {replica_of(engine, str(i)) for i in range(3)} == {1}
        await retiring
        for stream in streams:
            results = await stream.results()
            assert results[0].outputs[0].token_ids == slow_tokens(50)
        assert list(fleet.replicas) == [1]
        with pytest.raises(InvalidRequestError, match="there is no engine 7"):
            await fleet.retire(7)
        assert engine.admission._answers.most == 64 + engine._limits.max_queued

    with_fleet(talk, tmp_path, kinds=(EngineLink,))


def test_a_reload_replaces_every_engine_and_begun_answers_end_by_the_old_model(tmp_path):
    async def talk(engine):
        streams = [open_one(engine, SLOW, request_id=str(i), max_tokens=40) for i in range(4)]
        await asyncio.gather(*(several_steps(stream) for stream in streams))
        (tmp_path / "trained").touch()
        reloading = asyncio.ensure_future(engine.fleet.reload())
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="in progress"):
            await engine.fleet.reload()
        await reloading
        assert list(engine.fleet.replicas) == [2, 3]
        assert {state.arithmetic for state in engine.fleet.states()} == {"trained"}
        for stream in streams:
            assert (await stream.results())[0].outputs[0].token_ids == slow_tokens(40)
        assert tokens_of(await drain(open_one(engine, 10))) == [11, 12, 13, 14]
        assert engine.metrics.restarts.values.get("", 0) == 0

    with_fleet(talk, tmp_path)


def test_a_model_that_takes_other_requests_is_refused_and_all_stays_as_it_was(tmp_path):
    (tmp_path / "other-words").mkdir()
    (tmp_path / "other-words" / "larger").touch()

    async def talk(engine):
        with pytest.raises(ConfigError, match="another vocabulary"):
            await engine.fleet.reload(str(tmp_path / "other-words"))
        assert [state.replica for state in engine.fleet.states()] == [0, 1]
        assert tokens_of(await drain(open_one(engine, 10))) == [11, 12, 13, 14]

    with_fleet(talk, tmp_path)


def test_an_answer_that_no_engine_can_go_on_with_ends_with_an_error(tmp_path):
    async def talk(engine):
        begun = open_one(engine, SLOW, request_id="begun", max_tokens=200)
        await two_steps(begun)
        (tmp_path / "trained").touch()
        for replica in (0, 1):
            os.kill(pid_of(engine, replica), signal.SIGKILL)
        assert "computes as it did" in (await drain(begun))[-1].error
        assert tokens_of(await drain(open_one(engine, 10, request_id="b"))) == [11, 12, 13, 14]

    with_fleet(talk, tmp_path)


def test_a_queued_request_expires_in_the_fleets_queue(tmp_path):
    async def talk(engine):
        most = 64 + 64 // 8
        running = [open_one(engine, SLOW, request_id=f"r{i}", n=most, max_tokens=100) for i in range(2)]
        await asyncio.gather(*(one.__anext__() for one in running))
        accepted = engine.accept_request([10], SamplingParams(max_tokens=4), request_id="late")
        late = engine.open([accepted], stream=False, queue_timeout=0.01)
        assert engine.metrics.fleet_queued.values[""] == 1
        assert engine.metrics.waiting.values[""] == 1
        with pytest.raises(QueueTimeoutError, match="waited"):
            await late.results()
        (life,) = engine.history.find("late")
        assert engine.history.explain(life)[0].why == "fleet: no engine has room"
        for one in running:
            one.abort()

    with_fleet(talk, tmp_path)


def test_a_starting_engine_yields_cores_whenever_another_model_has_requests(monkeypatch):
    changes, others = [], [False, True, True, False, True]
    monkeypatch.setattr(fleet_module, "set_low_priority", lambda pids, is_low: changes.append((pids, is_low)))
    monkeypatch.setattr(fleet_module, "YIELD_SECONDS", 0.001)

    async def start():
        is_ready = asyncio.Event()

        def have_requests():
            if len(others) == 1:
                is_ready.set()
            return others.pop(0)

        fleet = fleet_module.Fleet(fleet_module.FleetOptions(yields=have_requests), "fcfs")
        await asyncio.wait_for(fleet._yield_cores([7], is_ready), 10)

    asyncio.run(start())
    assert changes == [([7], True), ([7], False), ([7], True), ([7], False)]


def test_what_a_journal_holds_is_taken_up_by_all_engines(tmp_path):
    async def serve(talk):
        config = EngineConfig.from_options(model=str(tmp_path))
        links = [EngineLink(config, RULE_CORE) for _ in range(2)]
        engine = await AsyncEngine.start(config, links, journal=Journal(tmp_path / "journal"), router="least-loaded")
        try:
            await asyncio.wait_for(talk(engine), 120)
        finally:
            engine.fail_all(EngineDeadError("killed"))
            await engine.close()

    async def first(engine):
        streams = [open_one(engine, SLOW, request_id=str(i), max_tokens=40) for i in range(4)]
        await asyncio.gather(*(two_steps(stream) for stream in streams))

    async def second(engine):
        assert sorted(replica_of(engine, str(i)) for i in range(4)) == [0, 0, 1, 1]
        await engine.drained()
        for i in range(4):
            ((_, output),) = await engine.journaled_calls.look_up(str(i), "")
            assert output.outputs[0].token_ids == slow_tokens(40)

    for talk in (first, second):
        asyncio.run(serve(talk))
