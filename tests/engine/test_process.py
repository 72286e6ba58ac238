"""The engine's process, driven by hand over its sockets."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from penstock.api.request import FinishReason, Request
from penstock.config.engine_config import EngineConfig
from penstock.engine.in_flight import InFlightStep
from penstock.engine.process import EngineLoop
from penstock.engine.protocol import (
    Add,
    Failed,
    Finish,
    Ping,
    Pong,
    Ready,
    Shutdown,
    StepOutputs,
    decode_from_engine,
    encode,
)
from penstock.fleet.link import EngineLink, describe_exit
from penstock.fleet.replica import await_ready
from tests.engine.rule_core import CRASH, HANG, MARKED, RULE_CORE, TELLING_CORE, RuleCore
from tests.support.params import GREEDY
from tests.support.waiting import alive, wait_until


def make_request(request_id, *prompt, max_tokens=4, n=1):
    return Request(request_id, prompt, replace(GREEDY, n=n, max_tokens=max_tokens), arrival=time.monotonic())


def with_engine(talk, model=None):
    """Run `talk(link)` against a fresh engine process and leave nothing behind."""

    async def run():
        link = EngineLink(EngineConfig.from_options(model=model), RULE_CORE)
        try:
            return await asyncio.wait_for(talk(link), 120)
        finally:
            link.destroy()

    return asyncio.run(run())


def test_a_starting_engine_tells_how_much_of_the_weights_it_has_read(caplog, monkeypatch):
    monkeypatch.setattr("penstock.system.loading_progress.INTERVAL", 0.0)

    async def run():
        link = EngineLink(EngineConfig(), TELLING_CORE)
        try:
            return await asyncio.wait_for(await_ready(link), 120), link.pid
        finally:
            link.destroy()

    with caplog.at_level("INFO", "penstock"):
        info, pid = asyncio.run(run())
    assert info.model_name == "rule"
    assert caplog.messages == [f"engine process {pid} has read {n} of 2 MiB of weights" for n in (1, 2)]


async def read_until_finished(link, request_id):
    tokens = []
    while True:
        message = await link.receive()
        assert isinstance(message, StepOutputs)
        for output in message.outputs:
            if output.request_id == request_id:
                tokens += output.token_ids
                if output.finish_reason is not None:
                    return tokens, output.finish_reason


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_engine_gets_ready_answers_requests_and_exits_when_asked():
    async def talk(link):
        assert isinstance(await link.receive(), Ready)
        link.send(Add(make_request("a", 10)))
        assert await read_until_finished(link, "a") == ([11, 12, 13, 14], FinishReason.LENGTH)
        await link.close(grace=60)
        return link.pid, await link.exited()

    pid, code = with_engine(talk)
    assert not alive(pid)
    assert code == 0, "it was not killed"


def test_all_outputs_of_one_step_travel_in_one_message():
    async def talk(link):
        await link.receive()
        link.send(Add(make_request("a", 10, n=8)))
        message = await link.receive()
        assert [output.index for output in message.outputs] == list(range(8))
        assert message.stats.num_running == 8

    with_engine(talk)


def test_a_finish_takes_effect_between_two_steps(tmp_path):
    with zmq.Context() as context:
        sockets = [context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PULL, zmq.PUSH)]
        requests, to_engine, from_engine, outputs = sockets
        for server, engine, name in ((to_engine, requests, "requests"), (from_engine, outputs, "outputs")):
            server.bind(f"inproc://{name}")
            engine.connect(f"inproc://{name}")

        class Core(RuleCore):
            def step(self, begin):
                step = super().step(begin)
                to_engine.send(encode(Finish("a", None, FinishReason.ABORT) if self._running else Shutdown()))
                return step

        to_engine.send(encode(Add(make_request("a", 10, max_tokens=400))))
        EngineLoop(Core(EngineConfig()), requests, outputs, InFlightStep(tmp_path / "in_flight")).run()
        told = [decode_from_engine(from_engine.recv()).outputs for _ in range(2)]
        assert [(one.token_ids, one.finish_reason) for (one,) in told] == [([11], None), ([], FinishReason.ABORT)]
        for socket in sockets:
            socket.close()


def test_an_idle_engine_sleeps_and_still_answers():
    async def talk(link):
        await link.receive()
        before = cpu_seconds(link.pid)
        await asyncio.sleep(0.5)
        assert cpu_seconds(link.pid) - before <= 0.02
        link.send(Ping())
        assert isinstance(await link.receive(), Pong)

    with_engine(talk)


def test_an_engine_does_not_wait_for_a_server_that_does_not_read(tmp_path):
    async def talk(link):
        await link.receive()
        link.send(Add(make_request("a", MARKED, max_tokens=5000)))  # more than a socket's buffers hold
        wait_until((tmp_path / "ended").exists)  # the event loop, and so the reading, stands still
        tokens, _ = await read_until_finished(link, "a")
        assert len(tokens) == 5000

    with_engine(talk, str(tmp_path))


def test_a_mistake_in_the_options_is_told_in_the_words_of_the_error():
    async def talk(link):
        code = await link.exited()
        return link.last_words(), code

    message, code = with_engine(talk, model="no-such-folder")
    assert message == Failed("there is no folder no-such-folder", mistake=True)
    assert code == 1


@pytest.mark.parametrize(("model", "prompt"), [("out-of-order", None), (None, CRASH)])
def test_an_engine_that_fails_says_why_and_exits(model, prompt, capfd):
    async def talk(link):
        if prompt is not None:
            await link.receive()
            link.send(Add(make_request("a", prompt)))
        code = await link.exited()
        return link.last_words(), code

    message, code = with_engine(talk, model)
    assert isinstance(message, Failed)
    assert not message.mistake
    assert "fell over" in message.message
    assert code == 1
    assert "RuntimeError" in capfd.readouterr().err


def test_signals_to_the_whole_group_leave_the_engine_to_the_server():
    async def talk(link):
        await link.receive()
        os.kill(link.pid, signal.SIGINT)
        os.kill(link.pid, signal.SIGTERM)
        link.send(Ping())
        assert isinstance(await link.receive(), Pong)
        assert os.getsid(link.pid) == link.pid

    with_engine(talk)


@pytest.mark.parametrize("prompt", [1, HANG])
def test_an_engine_ends_with_the_process_that_started_it_even_in_the_middle_of_a_step(prompt):
    script = f"""
import asyncio
from penstock.config.engine_config import EngineConfig
from penstock.fleet.link import EngineLink
from penstock.engine.protocol import Add
from tests.engine.rule_core import RULE_CORE
from tests.engine.test_process import make_request

async def main():
    link = EngineLink(EngineConfig(), RULE_CORE)
    await link.receive()
    link.send(Add(make_request("a", {prompt}, max_tokens=10**9)))
    print(link.pid, link.folder, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        pid, folder = parent.stdout.readline().decode().split()
        assert alive(pid)
        assert not Path(folder).exists(), "nobody needs it any more"
        time.sleep(0.2)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not alive(pid))


def test_the_private_folder_of_the_sockets_goes_with_the_link():
    async def talk(link):
        folder = Path(link.folder)
        assert folder.stat().st_mode & 0o077 == 0
        await link.receive()
        await link.close(grace=5)
        assert not folder.exists()

    with_engine(talk)


def test_an_exit_is_told_in_words():
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
def test_an_engine_that_hangs_while_it_loads_ends_with_its_server(tmp_path):
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.hanging_engine", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        wait_until((tmp_path / "hangs").exists)
        server.kill()
    try:
        wait_until(lambda: not alive(engine), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
