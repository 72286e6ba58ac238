import os
import signal
import time

import pytest

from penstock.checkpoint import resolve_path
from penstock.errors import EngineError, InvalidRequestError
from penstock.sampling_params import Structured
from penstock.structured.inspector import Inspector

ENDLESS = Structured.json_schema({"type": "integer", "multipleOf": 1234567})  # its automaton takes hours


@pytest.fixture
def inspector(vocabulary):
    made = Inspector(str(resolve_path(None)), vocabulary.size)
    yield made
    made.close()


def test_a_form_that_can_be_had_is_let_through_and_one_that_cannot_is_not(inspector):
    assert inspector.submit(Structured.json_object()).result() is None
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        inspector.submit(Structured.regex("(a")).result()


def test_what_was_found_out_is_kept(inspector):
    first = inspector.submit(Structured.json_object())
    first.result()
    assert inspector.submit(Structured.json_object()) is first


def test_a_form_that_takes_too_long_is_refused_and_the_next_is_not(inspector):
    inspector.submit(Structured.json_object()).result()
    worker = inspector._worker.pid
    endless, other = inspector.submit(ENDLESS), inspector.submit(Structured.choice(["a"]))
    time.sleep(0.1)
    os.kill(worker, signal.SIGXCPU)  # as the kernel does when the seconds are used up
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        endless.result()
    assert other.result() is None
    assert inspector._worker.pid != worker


def test_a_worker_that_was_killed_by_another_hand_is_replaced(inspector):
    inspector.submit(Structured.json_object()).result()
    os.kill(inspector._worker.pid, signal.SIGKILL)
    assert inspector.submit(Structured.choice(["a"])).result() is None


def test_the_kernel_holds_the_worker_to_its_seconds(inspector):
    inspector.submit(Structured.json_object()).result()
    with open(f"/proc/{inspector._worker.pid}/limits") as limits:
        soft = next(line.split()[3] for line in limits if line.startswith("Max cpu time"))
    assert 1 <= int(soft) <= 10


def test_closing_ends_the_worker_whatever_it_is_at(inspector):
    inspector.submit(Structured.json_object()).result()
    worker = inspector._worker
    future = inspector.submit(ENDLESS)
    time.sleep(0.05)
    inspector.close()
    assert worker.poll() is not None
    assert future.cancelled() or isinstance(future.exception(), EngineError)


def test_a_worker_that_does_not_start_is_no_ones_mistake(vocabulary, tmp_path):
    inspector = Inspector(str(tmp_path), vocabulary.size)  # no tokenizer there
    with pytest.raises(EngineError, match="did not start"):
        inspector.submit(Structured.json_object()).result()
    inspector.close()
