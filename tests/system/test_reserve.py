"""Memory that is backed before it is wanted."""

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.runner import machine
from penstock.system import reserve
from penstock.system.reserve import Arena, FileArena, Reserve
from tests.support.pages import backed_bytes

PAGE = 4096


def file_room(folder: Path, size: int) -> FileArena:
    """After one page of the file that is none of it."""
    with (folder / "file").open("wb+") as file:
        os.posix_fallocate(file.fileno(), 0, PAGE + size)
        return FileArena(file.fileno(), PAGE, size)


@pytest.mark.parametrize("of_file", [False, True])
def test_what_is_taken_is_zeroed_begins_a_cache_line_and_is_nobody_elses(tmp_path: Path, of_file: bool) -> None:
    room = file_room(tmp_path, 4 * PAGE) if of_file else Arena(4 * PAGE, 4 * PAGE)
    assert room.back_some()
    first, second, third = room.take(100), room.take(PAGE + 1), room.take(7)
    assert first is not None
    assert second is not None
    assert third is not None
    assert [part.ctypes.data % 64 for part in (first, second, third)] == [0, 0, 0]
    assert second.ctypes.data % PAGE == 0
    assert not first.any()
    first[:] = 1
    assert not second.any()
    second[:] = 2
    assert first.all()
    assert not third.any()


def test_what_is_written_is_in_the_file(tmp_path: Path) -> None:
    room = file_room(tmp_path, 4 * PAGE)
    first, second = room.take(100), room.take(PAGE + 1)
    assert first is not None
    assert second is not None
    first[:], second[:] = 1, 2
    assert (room.offset_of(first), room.offset_of(second[5:])) == (PAGE, 2 * PAGE + 5)
    assert room.offset_of(np.zeros(5, np.uint8)) is None
    assert room.end == 3 * PAGE + 1
    content = (tmp_path / "file").read_bytes()
    assert content == bytes(PAGE) + b"\1" * 100 + bytes(PAGE - 100) + b"\2" * (PAGE + 1) + bytes(2 * PAGE - 1)


def test_more_than_there_is_cannot_be_taken(tmp_path: Path) -> None:
    for room in (Arena(PAGE, 0), file_room(tmp_path, PAGE)):
        assert room.take(PAGE + 1) is None
        assert room.take(PAGE) is not None
        assert room.take(1) is None


def test_the_rest_goes_back_and_what_was_taken_stays() -> None:
    one = Reserve(Arena(64 * PAGE, 64 * PAGE))
    taken = one.take(PAGE + 1, for_weights=False)
    assert taken is not None
    taken[:] = 7
    one.give_back_rest()
    assert (taken == 7).all()
    assert one.take(1, for_weights=False) is None


def test_all_of_it_is_backed_if_there_is_time(tmp_path: Path) -> None:
    room, of_file = Arena(40 * 2**20, 20 * 2**20), file_room(tmp_path, 9 * 2**20)
    one = Reserve(room, of_file)
    one._thread.join()
    assert (room.backed, of_file.backed) == (20 * 2**20, 9 * 2**20)
    assert one.num_backed == 20 * 2**20  # the system counts pages of files as free


def test_weights_have_a_room_of_their_own_and_then_the_others(tmp_path: Path) -> None:
    of_file = file_room(tmp_path, 2 * PAGE)
    with reserve.opened(Reserve(Arena(2 * PAGE, 0), of_file)):
        parts = [reserve.zeros(PAGE, for_weights=is_weight) for is_weight in (True, False, True, True, True)]
    assert [of_file.offset_of(part) is not None for part in parts] == [True, False, True, False, False]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_is_memory_that_the_system_may_keep_in_large_pages() -> None:
    taken = Arena(PAGE, 0).take(1)
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
    one = Reserve(Arena(2**20, 2**20))
    one._thread.join()
    with reserve.opened(one):
        assert reserve.num_backed() == 2**20
        assert machine.detect_machine("cpu", lambda: 10**9).memory == 10**9 + 2**20
    assert machine.detect_machine("cpu", lambda: 10**9).memory == 10**9
