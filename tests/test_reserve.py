"""Memory that is backed before it is wanted."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock import reserve
from penstock.reserve import Reserve
from penstock.runner import machine
from tests.pages import backed_bytes

PAGE = 4096


def test_what_is_taken_is_zeroed_begins_a_cache_line_and_is_nobody_elses() -> None:
    one = Reserve(3 * PAGE, 3 * PAGE)
    first, second = one.take(100), one.take(PAGE)
    one.stop()
    assert first is not None
    assert second is not None
    assert (first.ctypes.data % 64, second.ctypes.data % 64) == (0, 0)
    assert not first.any()
    first[:] = 1
    assert not second.any()
    second[:] = 2
    assert first.all()


def test_what_is_given_back_is_the_systems_and_nothing_else() -> None:
    one = Reserve(8 * PAGE, 8 * PAGE)
    first, second, third = one.take(PAGE + 100), one.take(3 * PAGE), one.take(PAGE)
    assert first is not None
    assert second is not None
    assert third is not None
    for part in (first, second, third):
        part[:] = 1
    one.give_back(second)
    one.give_back(np.ones(4 * PAGE, np.uint8))  # not of the reserve
    assert first.all()
    assert third.all()
    assert second.sum() < 2 * PAGE  # whole pages of it


def test_more_than_there_is_cannot_be_taken() -> None:
    one = Reserve(PAGE, 0)
    assert one.take(PAGE + 1) is None
    assert one.take(PAGE) is not None
    assert one.take(1) is None
    one.stop()


def test_the_rest_goes_back_and_what_was_taken_stays() -> None:
    one = Reserve(64 * PAGE, 64 * PAGE)
    taken = one.take(PAGE + 1)
    assert taken is not None
    taken[:] = 7
    one.stop()
    one.give_back_rest()
    assert (taken == 7).all()
    assert one.take(1) is None


def test_all_of_it_is_backed_if_there_is_time() -> None:
    one = Reserve(40 * 2**20, 20 * 2**20)
    one._thread.join()
    assert one.backed == 20 * 2**20
    one.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_is_memory_that_the_system_may_keep_in_large_pages() -> None:
    one = Reserve(PAGE, 0)
    taken = one.take(1)
    assert taken is not None
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions = line.split()[:2]
        first, beyond = (int(bound, 16) for bound in bounds.split("-"))
        if first <= taken.ctypes.data < beyond:
            assert permissions == "rw-p"  # with an s it is shared, in small pages only
            return
    raise AssertionError("it is mapped nowhere")


def test_without_a_reserve_the_system_gives_zeros() -> None:
    assert np.array_equal(reserve.zeros(10), np.zeros(10, np.uint8))


def test_they_are_not_memory_that_was_freed_and_has_to_be_cleared() -> None:
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    *freed, last = [malloc(100_000) for _ in range(1000)]  # less than what malloc maps, so one piece when freed
    for piece in freed:
        free(piece)
    zeros = reserve.zeros(2**26)
    free(last)
    assert backed_bytes(zeros) == 0
    zeros[10 * PAGE] = 1
    assert 0 < backed_bytes(zeros) <= 2**21  # one page, which may be a large one


def test_more_than_the_system_has_is_told() -> None:
    with pytest.raises(MemoryError, match="no 1125899906842624 bytes"):
        reserve.zeros(2**50)


def test_what_is_backed_for_the_model_counts_as_free_for_it() -> None:
    one = Reserve(2**20, 2**20)
    one._thread.join()
    with reserve.opened(one):
        assert reserve.num_backed() == one.backed
        assert machine.detect_machine("cpu", lambda: 10**9).memory == 10**9 + one.backed
    assert machine.detect_machine("cpu", lambda: 10**9).memory == 10**9
