"""Packed weights on disk: what is whole is mapped, what is not is set aside, and the folder stays within its bound."""

import mmap
import os
import re
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.system import packed_file, weight_cache
from penstock.system.packed_file import Entry
from penstock.system.weight_cache import WeightCache

KEY, OTHER = "ab" * 16, "cd" * 16


def entries(seed: int = 0, size: int = 3 * 4096 + 5) -> dict[str, Entry]:
    rng = np.random.default_rng(seed)
    large, small, none = (rng.integers(0, 256, count, np.uint8) for count in (size, 70, 0))
    return {"a": Entry("1", (large, none)), "b": Entry("2", (small,))}


def write(cache: WeightCache, key: str = KEY, seed: int = 0, size: int = 3 * 4096 + 5) -> bool:
    return write_entries(cache, entries(seed, size), key)


def write_entries(cache: WeightCache, made: dict[str, Entry], key: str = KEY) -> bool:
    with cache.locked(key) as is_mine:
        assert is_mine
        writer = cache.begin(key, sum(part.nbytes for entry in made.values() for part in entry.parts))
        if writer is None:
            return False
        with closing(writer):
            return writer.finish(made)


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "some" / "folder")
    assert cache.find(KEY) is None
    assert write(cache)
    found = cache.find(KEY)
    assert found is not None
    for name, entry in entries().items():
        kept = found.get(name)
        assert kept is not None
        assert kept.form == entry.form
        assert all(np.array_equal(a, b) for a, b in zip(kept.parts, entry.parts, strict=True))
    large = found.get("a")
    assert large is not None
    assert large.parts[0].ctypes.data % 4096 == 0
    assert found.get("c") is None
    assert cache.find(OTHER) is None
    assert (tmp_path / "some" / "folder").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("room", [0, 4096, 8 * 2**20 + 300, 2**24])
@pytest.mark.parametrize("sizes", [(), (0,), (5, 5 * 2**20 + 3, 0, 70, 3 * 2**20)], ids=str)
def test_parts_of_the_drafts_room_and_of_other_memory_are_found_again(
    tmp_path: Path, sizes: tuple[int, ...], room: int
) -> None:
    rng = np.random.default_rng(0)
    cache = WeightCache(tmp_path / "folder")
    made = {}
    with cache.locked(KEY):
        writer = cache.begin(KEY, room)
        assert writer is not None
        for i, size in enumerate(sizes):
            content = rng.integers(0, 256, size, np.uint8)
            part = writer.arena.take(size)
            if part is None:
                part = content
            else:
                assert not part.any()
                part[:] = content
            made[str(i)] = Entry("1", (part,))
        with closing(writer):
            assert writer.finish(made)
    found = cache.find(KEY)
    assert found is not None
    for name, entry in made.items():
        kept = found.get(name)
        assert kept is not None
        assert np.array_equal(kept.parts[0], entry.parts[0])
    assert found.path.stat().st_size <= 2 * 2**20 + sum(-(-size // 4096) * 4096 for size in sizes) + 4096


def test_a_writer_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "folder")
    with cache.locked(KEY):
        left = tmp_path / "folder" / f"{KEY}.tmp"
        left.write_text("its owner died")
        writer = cache.begin(KEY, 5000)
        assert writer is not None
        part = writer.arena.take(5000)
        assert part is not None
        assert left.stat().st_size > 2**20
        writer.close()
        part[:] = 1  # it is still memory
    assert [path.suffix for path in (tmp_path / "folder").iterdir()] == [".lock"]


def test_a_model_of_too_many_weights_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = {f"{number:064}": Entry("1", ()) for number in range(30_000)}
    assert not write_entries(WeightCache(tmp_path / "folder"), made)
    assert "too many weights" in caplog.text
    assert not list((tmp_path / "folder").glob("*.[tp]*"))


def huge_kib(file: Path) -> int:
    """KiB of the file that this process has mapped in huge pages."""
    total, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(str(file))
        elif is_of_file and line.startswith("FilePmdMapped:"):
            total += int(line.split()[1])
    return total


def test_weights_of_any_size_are_mapped_in_huge_pages(tmp_path: Path) -> None:
    sizes = [1_300_000 + 77 * i for i in range(8)]
    cache = WeightCache(tmp_path / "folder")
    with cache.locked(KEY):
        writer = cache.begin(KEY, sum(sizes) + 2**20)
        assert writer is not None
        made = {}
        for size in sizes:
            part = writer.arena.take(size)
            assert part is not None
            part[:] = 1
            made[str(size)] = Entry("1", (part,))
        with closing(writer):
            assert writer.finish(made)
    found = cache.find(KEY)
    assert found is not None
    for name in made:
        kept = found.get(name)
        assert kept is not None
        assert kept.parts[0].all()
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(4 << 20))
    with plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert not any(pages[::4096])
        if not huge_kib(plain):
            pytest.skip("this system has no huge pages of files")
    assert huge_kib(found.path) >= 4096


def test_nobody_who_maps_it_can_change_it(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "folder")
    assert write(cache)
    found = cache.find(KEY)
    assert found is not None
    part = found.get("a")
    assert part is not None
    part.parts[0][:] = 0
    again = cache.find(KEY)
    assert again is not None
    fresh = again.get("a")
    assert fresh is not None
    assert fresh.parts[0].any()


@pytest.mark.parametrize("offset", [0, 9, 20, 60, 200, 2**20, 2 * 2**20, 2 * 2**20 + 7096, -1])
def test_a_changed_byte_anywhere_sets_it_aside(offset: int, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    tmp_path.chmod(0o700)
    assert write(cache)
    path = tmp_path / f"{KEY}.packed"
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)
    assert cache.find(KEY) is None
    assert not path.exists()
    assert path.with_suffix(".damaged").exists()
    assert write(cache)
    assert cache.find(KEY) is not None


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 511), (256, 511), (64, 192), (3, 512)])
def test_two_words_that_changed_places_set_it_aside(one: int, other: int, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    tmp_path.chmod(0o700)
    assert write(cache)
    path = tmp_path / f"{KEY}.packed"
    content = bytearray(path.read_bytes())
    words = np.frombuffer(content, np.uint64)[2 * 2**20 // 8 :]
    words[[one, other]] = words[[other, one]]
    path.write_bytes(content)
    assert cache.find(KEY) is None
    assert path.with_suffix(".damaged").exists()


def test_a_file_of_an_earlier_version_is_packed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = WeightCache(tmp_path)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(packed_file, "_VERSION", packed_file._VERSION - 1)
    assert write(cache)
    monkeypatch.undo()
    assert cache.find(KEY) is None
    assert "is of another version" in caplog.text
    assert write(cache)
    assert cache.find(KEY) is not None


@pytest.mark.parametrize("size", [0, 7, 40, 4096, 2 * 2**20, 2 * 2**20 + 8192])
def test_one_that_was_cut_short_is_set_aside(size: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    cache = WeightCache(tmp_path)
    assert write(cache)
    os.truncate(tmp_path / f"{KEY}.packed", size)
    assert cache.find(KEY) is None
    assert (tmp_path / f"{KEY}.damaged").exists()


def test_the_file_of_another_key_is_set_aside(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    cache = WeightCache(tmp_path)
    assert write(cache)
    (tmp_path / f"{KEY}.packed").rename(tmp_path / f"{OTHER}.packed")
    assert cache.find(OTHER) is None


def test_what_was_not_used_for_longest_goes_where_the_folder_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(weight_cache, "_MAX_BYTES", 7 * 2**20)
    cache = WeightCache(tmp_path)
    keys = [f"{number:032x}" for number in range(4)]
    for age, key in enumerate(keys[:3]):
        assert write(cache, key, size=30_000)
        os.utime(tmp_path / f"{key}.packed", (1000 + age, 1000 + age))
    assert cache.find(keys[0]) is not None  # used now
    assert write(cache, keys[3], size=30_000)
    assert [cache.find(key) is not None for key in keys] == [True, False, True, True]
    assert not write(cache, OTHER, size=6 * 2**20)
    assert cache.find(OTHER) is None


def test_a_full_disk_or_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = WeightCache(tmp_path / "folder")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for full_call in ("posix_fallocate", "ftruncate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, full_call, full)
            assert not write(cache)
        assert not list((tmp_path / "folder").glob("*.[tp]*"))
    (tmp_path / "file").write_text("")
    with WeightCache(tmp_path / "file" / "folder").locked(KEY) as is_mine:
        assert not is_mine


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "folder")
    assert write(cache)
    (tmp_path / "folder").chmod(0o777)
    assert cache.find(KEY) is None
    with cache.locked(KEY) as is_mine:
        assert not is_mine


def test_a_folder_that_cannot_be_entered_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = WeightCache(tmp_path / ("long" * 100))
    assert cache.find(KEY) is None
    with cache.locked(KEY) as is_mine:
        assert not is_mine
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    left, being_written = tmp_path / f"{'ef' * 16}.tmp", tmp_path / f"{OTHER}.tmp"
    for file in (left, being_written):
        file.write_bytes(b"half a model")
    with cache.locked(OTHER) as is_mine:
        assert is_mine
        assert write(cache)
        assert being_written.exists()
    assert not left.exists()


def test_one_packs_and_the_others_wait(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "folder")
    found = []

    def other() -> None:
        with WeightCache(tmp_path / "folder").locked(KEY) as is_mine:
            found.append((is_mine, cache.find(KEY) is not None))

    with cache.locked(KEY) as is_mine:
        assert is_mine
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        assert found == []
        writer = cache.begin(KEY, 2**20)
        assert writer is not None
        with closing(writer):
            assert writer.finish(entries())
    thread.join()
    assert found == [(True, True)]


def test_who_waits_too_long_packs_without_keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "_LOCK_SECONDS", 0.0)
    cache = WeightCache(tmp_path / "folder")
    with cache.locked(KEY), WeightCache(tmp_path / "folder").locked(KEY) as is_mine:
        assert not is_mine


def test_who_may_not_wait_is_told_at_once(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "folder")
    with cache.locked(KEY), WeightCache(tmp_path / "folder").locked(KEY, seconds=0) as is_mine:
        assert not is_mine
    with cache.locked(KEY, seconds=0) as is_mine:
        assert is_mine


def test_a_file_that_is_open_already_is_used_for_its_key_alone(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "folder")
    for key in (KEY, OTHER):
        with cache.locked(key), closing(cache.begin(key, 2**20) or pytest.fail("no room")) as writer:
            assert writer.finish(entries())
    opened = cache.open(KEY)
    assert opened is not None
    assert cache.find(KEY, opened) is opened
    other = cache.find(OTHER, opened)
    assert other is not None
    assert other.key == OTHER
    opened.path.unlink()
    assert cache.find(KEY, opened) is None


def test_the_files_are_listed_with_their_models_and_deleted_but_for_one_that_is_written(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "packed")
    assert cache.files() == cache.clear() == []
    for key, name in ((KEY, "small, int8 (/models/small)"), (OTHER, "")):
        with cache.locked(key), closing(cache.begin(key, 5000, name) or pytest.fail("no room")) as writer:
            assert writer.finish(entries())
    (tmp_path / "packed" / "ef.packed").write_bytes(b"of another version")
    (tmp_path / "packed" / "ef.damaged").write_bytes(b"x")
    (tmp_path / "packed" / "precious.txt").write_text("not a file of the cache")
    os.utime(tmp_path / "packed" / f"{KEY}.packed", (2**31, 2**31))
    found = cache.files()
    assert found[0].about == "small, int8 (/models/small)"
    assert found[0].size == (tmp_path / "packed" / f"{KEY}.packed").stat().st_size
    assert {one.about for one in found[1:]} == {"a model", "of another version of Penstock, or damaged", "damaged"}
    assert 0 < cache.usage()[1] <= 64 * 2**30
    mapped = cache.find(KEY)
    with cache.locked("12"), closing(cache.begin("12", 5000) or pytest.fail("no room")):
        assert [file.about for file in cache.files() if file.path.suffix == ".tmp"] == ["being written"]
        assert len(cache.clear()) == 4
        assert [file.about for file in cache.files()] == ["being written"]
    assert mapped is not None
    assert mapped.is_whole(), "who has mapped a file keeps it"
    assert (tmp_path / "packed" / "precious.txt").exists()
