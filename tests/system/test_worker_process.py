"""A child process that is asked in frames: at whatever point it ends, stops or falls silent."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys

import pytest

from penstock.system.worker_process import WorkerEndedError, WorkerProcess
from tests.support.waiting import alive, wait_until

CHANNEL = "from penstock.system.worker_channel import Channel\nchannel = Channel()\n"
ECHO = CHANNEL + "while True: channel.send(channel.receive())"


def ask(worker, frame, longest, patience):
    return worker.ask(frame, longest=longest, patience=patience)


def ask_from_loop(worker, frame, longest, patience):
    async def answer():
        return await worker.ask_from_loop(frame, longest=longest, patience=patience)

    return asyncio.run(answer())


both_ways = pytest.mark.parametrize("ask", [ask, ask_from_loop])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Starts a child that runs a script; all are ended after the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    workers = []

    def start(script):
        (tmp_path / "child_of_a_test.py").write_text(script)
        workers.append(WorkerProcess("child_of_a_test"))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@both_ways
def test_each_frame_is_answered_also_one_larger_than_the_socket_takes(run, ask):
    worker = run(ECHO)
    assert ask(worker, b"b" * 2**20, 2**20, 60) == b"b" * 2**20


def test_frames_are_answered_one_after_the_other_also_empty_ones(run):
    worker = run(ECHO)
    assert [ask(worker, frame, 1, 60) for frame in (b"a", b"", b"b")] == [b"a", b"", b"b"]


def test_matrix_products_of_a_child_use_one_thread(run):
    told = "channel.receive()\nimport os; channel.send(os.environ['OPENBLAS_NUM_THREADS'].encode())"
    assert ask(run(CHANNEL + told), b"", 1, 60) == b"1"


@both_ways
def test_a_process_that_has_exited_is_reported_with_its_exit_code(run, ask):
    worker = run("import sys; sys.exit(7)")
    wait_until(lambda: not alive(worker.pid))
    with pytest.raises(WorkerEndedError, match="exit code 7"):
        ask(worker, b"a", 1, 60)


@both_ways
def test_an_end_in_the_middle_of_an_answer_is_an_end_and_no_answer(run, ask):
    worker = run(CHANNEL + "channel.receive()\nimport os; os.write(0, b'half'); os.kill(os.getpid(), 9)")
    with pytest.raises(WorkerEndedError) as error:
        ask(worker, b"a", 9, 60)
    assert error.value.exit_code == -signal.SIGKILL


@both_ways
@pytest.mark.parametrize("answer", [b"", b"half", (9).to_bytes(8, "little") + b"half"])
def test_a_process_that_falls_silent_is_killed_in_time(run, ask, answer):
    worker = run(CHANNEL + f"channel.receive()\nimport os, time; os.write(0, {answer!r}); time.sleep(1e6)")
    with pytest.raises(WorkerEndedError, match="in time") as error:
        ask(worker, b"a", 9, 0.3)
    assert error.value.exit_code is None
    assert not alive(worker.pid)


@both_ways
def test_a_process_that_does_not_read_is_killed_in_time(run, ask):
    worker = run("import time; time.sleep(1e6)")
    with pytest.raises(WorkerEndedError, match="in time"):
        ask(worker, b"a" * 2**20, 1, 0.3)


def test_the_end_of_a_child_whose_caller_left_while_sending_logs_no_error(run):
    worker = run(CHANNEL + "import time; time.sleep(1000)")
    told = []

    async def leave():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        sending = asyncio.create_task(worker.ask_from_loop(b"a" * 2**24, longest=1, patience=60))
        await asyncio.sleep(0.1)
        sending.cancel()
        await asyncio.wait([sending])
        worker.kill()
        await asyncio.sleep(0.3)  # its end is read
        worker._arriving = None
        del sending
        gc.collect()

    asyncio.run(leave())
    assert not told


@both_ways
def test_a_process_whose_answer_is_longer_than_allowed_is_ended(run, ask):
    worker = run(ECHO)
    with pytest.raises(WorkerEndedError):
        ask(worker, b"ab", 1, 60)
    assert not alive(worker.pid)


def test_closing_waits_for_the_end_of_the_child_and_may_be_repeated(run):
    worker = run(ECHO)
    for _ in range(2):
        worker.close()
        assert not alive(worker.pid)


def test_what_a_child_prints_is_no_answer(run):
    worker = run("print('noise', flush=True)\n" + ECHO)
    assert ask(worker, b"a", 1, 60) == b"a"


def test_a_child_ends_when_its_socket_closes():
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "penstock.structured.worker"]
        child = subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE)
    ours.close()
    assert child.communicate(timeout=120) == (None, b"")
    assert child.returncode == 0


def test_a_program_that_does_not_exist_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(OSError, match="nothing"):
        WorkerProcess("penstock.structured.worker")
