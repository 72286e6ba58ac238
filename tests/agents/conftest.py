"""A time limit for each test of the suites: an agent that waits for ever fails."""

import signal
from collections.abc import Iterator

import pytest

LONGEST_TEST = 120
"""Seconds."""


def _expire(*_: object) -> None:
    raise TimeoutError(f"this took more than {LONGEST_TEST} s")


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    signal.signal(signal.SIGALRM, _expire)
    signal.alarm(LONGEST_TEST)
    yield
    signal.alarm(0)
