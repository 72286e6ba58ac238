import os
import resource
import signal
import threading

import pytest

from penstock.api.sampling_params import Structured
from penstock.checkpoint.checkpoint import resolve_path
from penstock.errors import EngineError, InvalidRequestError
from penstock.structured.grammar_validator import GrammarValidator
from tests.support import schemas
from tests.support.waiting import alive, stop, wait_until

ENDLESS = Structured.json_schema(schemas.ENDLESS)


@pytest.fixture
def validator(vocabulary):
    made = GrammarValidator(str(resolve_path(None)), vocabulary.size)
    yield made
    made.close()


def test_a_valid_grammar_is_accepted_and_an_invalid_one_refused(validator):
    assert validator.submit(Structured.json_object()).result() is None
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        validator.submit(Structured.regex("(a")).result()


def test_results_are_cached(validator):
    first = validator.submit(Structured.json_object())
    first.result()
    assert validator.submit(Structured.json_object()) is first


def test_cached_results_are_bounded_by_the_characters_of_their_grammars(validator):
    large = [Structured.json_schema({"const": str(i) + "x" * 500_000}) for i in range(10)]
    for grammar in large:
        validator.submit(grammar).exception()
    assert [validator.knows(grammar) for grammar in large] == [False] * 2 + [True] * 8


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_not(validator):
    validator.submit(Structured.json_object()).result()
    worker = validator._worker.pid
    endless, other = validator.submit(ENDLESS), validator.submit(Structured.choice(["a"]))
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        endless.result()
    assert other.result() is None
    assert validator._worker.pid != worker


def test_a_worker_that_was_killed_from_outside_is_replaced(validator):
    validator.submit(Structured.json_object()).result()
    os.kill(validator._worker.pid, signal.SIGKILL)
    assert validator.submit(Structured.choice(["a"])).result() is None


def test_a_worker_that_died_before_it_read_a_grammar_is_replaced(validator):
    validator.submit(Structured.json_object()).result()
    worker = validator._worker
    worker.kill()
    wait_until(lambda: not alive(worker.pid))  # so that the grammar is written to a socket without a reader
    assert validator.submit(Structured.choice(["a"])).result() is None


def test_a_signal_that_no_grammar_causes_is_not_blamed_on_one(validator):
    validator.submit(Structured.json_object()).result()
    os.kill(validator._worker.pid, signal.SIGHUP)
    assert validator.submit(Structured.choice(["a"])).result() is None


def test_a_worker_that_is_stopped_is_replaced_even_if_a_grammar_is_larger_than_a_socket_takes(validator):
    validator.submit(Structured.json_object()).result()
    stopped = validator._worker
    stop(stopped.pid)
    patience, validator.patience = validator.patience, 0.2
    with pytest.raises(EngineError):  # the second one has too little time to start
        validator.submit(Structured.choice(["a" * 2**18])).result()
    assert not alive(stopped.pid)
    validator.patience = patience
    assert validator.submit(Structured.choice(["a"])).result() is None


def test_a_server_with_more_than_1024_files_open_has_a_worker_too(validator):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    files = [os.dup(0) for _ in range(1100)]
    try:
        assert validator.submit(Structured.json_object()).result() is None
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_closed_validator_starts_no_worker(validator):
    validator.submit(Structured.json_object()).result()
    with (
        validator._starting
    ):  # the worker that this grammar is to have has not been started when the validator is closed
        validator._worker.kill()
        future = validator.submit(Structured.choice(["a"]))
        closing = threading.Thread(target=validator.close)
        closing.start()
        validator._closed = True
    closing.join()
    assert validator._worker is None
    assert future.cancelled() or isinstance(future.exception(), EngineError)


def test_closing_ends_the_worker_whatever_it_is_at(validator):
    validator.submit(Structured.json_object()).result()
    worker = validator._worker
    future = validator.submit(ENDLESS)
    validator.close()
    assert not alive(worker.pid)
    assert future.cancelled() or isinstance(future.exception(), EngineError)


def test_a_worker_that_does_not_start_is_no_ones_mistake(vocabulary, tmp_path):
    validator = GrammarValidator(str(tmp_path), vocabulary.size)  # no tokenizer there
    with pytest.raises(EngineError, match="did not start"):
        validator.submit(Structured.json_object()).result()
    validator.close()
