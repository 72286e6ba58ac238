import os
import resource
import signal
import threading

import pytest

from penstock.api.sampling_params import Structured
from penstock.checkpoint.checkpoint import resolve_path
from penstock.errors import EngineError, InvalidRequestError
from penstock.structured.inspector import Inspector
from tests.support import schemas
from tests.support.waiting import alive, stop, wait_until

ENDLESS = Structured.json_schema(schemas.ENDLESS)


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


def test_the_kept_results_are_bounded_by_their_characters(inspector):
    large = [Structured.json_schema({"const": str(i) + "x" * 500_000}) for i in range(10)]
    for form in large:
        inspector.submit(form).exception()
    assert [inspector.knows(form) for form in large] == [False] * 2 + [True] * 8


def test_a_form_that_takes_too_long_is_refused_and_the_next_is_not(inspector):
    inspector.submit(Structured.json_object()).result()
    worker = inspector._worker.pid
    endless, other = inspector.submit(ENDLESS), inspector.submit(Structured.choice(["a"]))
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        endless.result()
    assert other.result() is None
    assert inspector._worker.pid != worker


def test_a_worker_that_was_killed_by_another_hand_is_replaced(inspector):
    inspector.submit(Structured.json_object()).result()
    os.kill(inspector._worker.pid, signal.SIGKILL)
    assert inspector.submit(Structured.choice(["a"])).result() is None


def test_a_worker_that_died_before_it_read_a_form_is_replaced(inspector):
    inspector.submit(Structured.json_object()).result()
    worker = inspector._worker
    worker.kill()
    wait_until(lambda: not alive(worker.pid))  # so that the form is written to a socket without a reader
    assert inspector.submit(Structured.choice(["a"])).result() is None


def test_a_signal_that_no_form_causes_is_not_blamed_on_one(inspector):
    inspector.submit(Structured.json_object()).result()
    os.kill(inspector._worker.pid, signal.SIGHUP)
    assert inspector.submit(Structured.choice(["a"])).result() is None


def test_a_worker_that_is_stopped_is_replaced_even_if_a_form_is_larger_than_a_socket_takes(inspector):
    inspector.submit(Structured.json_object()).result()
    stopped = inspector._worker
    stop(stopped.pid)
    patience, inspector.patience = inspector.patience, 0.2
    with pytest.raises(EngineError):  # the second one has too little time to start
        inspector.submit(Structured.choice(["a" * 2**18])).result()
    assert not alive(stopped.pid)
    inspector.patience = patience
    assert inspector.submit(Structured.choice(["a"])).result() is None


def test_a_server_with_more_than_1024_files_open_has_a_worker_too(inspector):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    files = [os.dup(0) for _ in range(1100)]
    try:
        assert inspector.submit(Structured.json_object()).result() is None
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_closed_inspector_starts_no_worker(inspector):
    inspector.submit(Structured.json_object()).result()
    with inspector._starting:  # the worker that this form is to have has not been started when the inspector is closed
        inspector._worker.kill()
        future = inspector.submit(Structured.choice(["a"]))
        closing = threading.Thread(target=inspector.close)
        closing.start()
        inspector._closed = True
    closing.join()
    assert inspector._worker is None
    assert future.cancelled() or isinstance(future.exception(), EngineError)


def test_closing_ends_the_worker_whatever_it_is_at(inspector):
    inspector.submit(Structured.json_object()).result()
    worker = inspector._worker
    future = inspector.submit(ENDLESS)
    inspector.close()
    assert not alive(worker.pid)
    assert future.cancelled() or isinstance(future.exception(), EngineError)


def test_a_worker_that_does_not_start_is_no_ones_mistake(vocabulary, tmp_path):
    inspector = Inspector(str(tmp_path), vocabulary.size)  # no tokenizer there
    with pytest.raises(EngineError, match="did not start"):
        inspector.submit(Structured.json_object()).result()
    inspector.close()
