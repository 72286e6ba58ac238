"""A child process that is talked to in lines: at whatever point it ends, stops or falls silent."""

import signal
import sys

import pytest

from penstock.structured.worker_process import WorkerProcess
from tests.support.waiting import wait_until

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


@pytest.fixture
def run():
    """Starts `python -c SCRIPT`; all are ended after the test."""
    workers = []

    def start(script):
        workers.append(WorkerProcess([sys.executable, "-c", script]))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
        worker.close()


def test_each_line_is_answered_also_one_larger_than_a_pipe(run):
    worker = run(ECHO)
    for line in (b"a", b"b" * 2**20, b""):
        assert worker.ask(line, 60) == line


def test_two_lines_in_one_piece_are_two_answers(run):
    worker = run("print('a\\nb')")
    assert [worker.read_line(60), worker.read_line(60)] == [b"a", b"b"]


def test_a_process_that_has_exited_breaks_the_pipe_and_closing_it_tells_how_it_ended(run):
    worker = run("import sys; sys.exit(7)")
    wait_until(lambda: worker.has_exited)
    with pytest.raises(BrokenPipeError):
        worker.ask(b"a", 60)
    assert worker.close() == 7


def test_an_end_in_the_middle_of_an_answer_is_an_end_and_no_answer(run):
    worker = run("import os; input(); os.write(1, b'half'); os.kill(os.getpid(), 9)")
    with pytest.raises(EOFError):
        worker.ask(b"a", 60)
    assert worker.close() == -signal.SIGKILL


@pytest.mark.parametrize("answer", ["", "half of a line"])
def test_a_process_that_falls_silent_is_given_up_in_time(run, answer):
    worker = run(f"import os, time; input(); os.write(1, {answer.encode()!r}); time.sleep(1e6)")
    with pytest.raises(TimeoutError):
        worker.ask(b"a", 0.3)
    assert worker.close() == -signal.SIGKILL


def test_a_process_that_does_not_read_is_given_up_in_time(run):
    worker = run("import time; time.sleep(1e6)")
    with pytest.raises(TimeoutError):
        worker.ask(b"a" * 2**20, 0.3)


def test_what_is_no_program_does_not_start(tmp_path):
    with pytest.raises(OSError, match="nothing"):
        WorkerProcess([str(tmp_path / "nothing")])
