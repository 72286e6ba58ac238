"""The memory of weights and caches, some of it in a file."""

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.system.allocator import Allocator, FileArena
from tests.support.pages import backed_bytes

PAGE = 4096


def file_room(folder: Path, size: int) -> FileArena:
    """After one page of the file that is none of it."""
    with (folder / "file").open("wb+") as file:
        os.posix_fallocate(file.fileno(), 0, PAGE + size)
        return FileArena(file.fileno(), PAGE, size)


def test_what_is_taken_is_zeroed_begins_a_cache_line_and_is_nobody_elses(tmp_path: Path) -> None:
    room = file_room(tmp_path, 4 * PAGE)
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
    room = file_room(tmp_path, PAGE)
    assert room.take(PAGE + 1) is None
    assert room.take(PAGE) is not None
    assert room.take(1) is None


def test_weights_lie_in_a_file_as_long_as_that_has_room(tmp_path: Path) -> None:
    of_file = file_room(tmp_path, 2 * PAGE)
    allocator = Allocator()
    with allocator.in_file(of_file):
        parts = [allocator.zeros(PAGE, for_weights=is_weight) for is_weight in (True, False, True, True, True)]
        assert [of_file.offset_of(part) is not None for part in parts] == [True, False, True, False, False]


def test_the_weights_of_the_next_model_lie_elsewhere_even_if_the_file_has_room(tmp_path: Path) -> None:
    of_file = file_room(tmp_path, 4 * PAGE)
    allocator = Allocator()
    before = allocator.zeros(PAGE, for_weights=True)
    with allocator.in_file(of_file):
        inside = allocator.zeros(PAGE, for_weights=True)
    after = allocator.zeros(PAGE, for_weights=True)
    assert [of_file.offset_of(part) is not None for part in (before, inside, after)] == [False, True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_is_memory_that_the_system_may_keep_in_large_pages() -> None:
    taken = Allocator().zeros(1)
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions = line.split()[:2]
        first, beyond = (int(bound, 16) for bound in bounds.split("-"))
        if first <= taken.ctypes.data < beyond:
            assert permissions == "rw-p"  # with an s it is shared, in small pages only
            return
    raise AssertionError("it is mapped nowhere")


def test_the_system_gives_zeros() -> None:
    assert np.array_equal(Allocator().zeros(10), np.zeros(10, np.uint8))


def test_they_are_not_memory_that_was_freed_and_has_to_be_cleared() -> None:
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    *freed, last = [malloc(100_000) for _ in range(1000)]  # less than what malloc maps, so one piece when freed
    for piece in freed:
        free(piece)
    zeros = Allocator().zeros(2**26)
    free(last)
    assert backed_bytes(zeros) == 0
    zeros[10 * PAGE] = 1
    assert 0 < backed_bytes(zeros) <= 2**21  # one page, which may be a large one


def test_more_than_the_system_has_is_told() -> None:
    with pytest.raises(MemoryError, match="no 1125899906842624 bytes"):
        Allocator().zeros(2**50)
