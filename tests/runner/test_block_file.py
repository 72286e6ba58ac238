"""The file that blocks are kept in: what it says is right, or it says nothing."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.core.stored_blocks import Record, StoredTree, path_digest, root_digest
from penstock.errors import ConfigError
from penstock.kernels.attention.reference_cache import GatheredBytes
from penstock.runner.block_file import BlockFile, Layout, checksum_of, open_own, open_peer, open_temporary
from tests.runner.blocks import DIGEST, KEY, LAYOUT, SIZE, put


def opened(path: Path, layout: Layout = LAYOUT, size: int = SIZE) -> tuple[BlockFile, bool]:
    return open_own(path, layout, size)


def get(file: BlockFile, slot: int = 3, digest: bytes = DIGEST, key: bytes = KEY) -> bytes | None:
    room = bytearray(5000)
    return bytes(room) if file.read_block(slot, 0, digest, key, memoryview(room)) else None


def test_what_was_written_is_found_by_the_next_who_opens_it(tmp_path: Path) -> None:
    file, is_known = opened(tmp_path / "kv")
    assert not is_known
    put(file)
    file.close()
    file, is_known = opened(tmp_path / "kv")
    assert is_known
    assert list(file.records()) == [Record(3, DIGEST, root_digest(""), 0, KEY, 7)]
    assert get(file) == b"k" * 5000
    assert len(StoredTree(file.num_slots, file.records())) == 1


def test_the_content_of_images_is_kept_beside_the_tokens(tmp_path: Path) -> None:
    layout, seen = replace(LAYOUT, content_bytes=32), KEY + bytes(range(32))
    file, _ = opened(tmp_path / "kv", layout)
    put(file)
    digest = path_digest(DIGEST, seen)
    file.write_record(Record(4, digest, DIGEST, 1, seen, 8, 1), [file.write_block(4, 0, memoryview(b"i" * 5000)), 0])
    file.close()
    file, is_known = opened(tmp_path / "kv", layout)
    assert is_known
    assert [record.key for record in file.records()] == [KEY, seen]
    assert get(file, 4, digest, seen) == b"i" * 5000
    assert get(file, 4, digest, KEY) is None
    assert not opened(tmp_path / "kv.1")[1]


def test_the_cache_groups_of_a_slot_are_told_apart(tmp_path: Path) -> None:
    file, _ = opened(tmp_path / "kv")
    put(file)
    room = bytearray(96)
    assert not file.read_block(3, 1, DIGEST, KEY, memoryview(room)), "it is not there"
    parts = [file.write_block(3, group, memoryview(content)) for group, content in enumerate((b"a" * 5000, b"w" * 96))]
    file.write_record(Record(3, DIGEST, root_digest(""), 0, KEY, 8, 3), parts)
    assert file.read_block(3, 1, DIGEST, KEY, memoryview(room))
    assert (get(file), bytes(room)) == (b"a" * 5000, b"w" * 96)


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    (tmp_path / "kv").touch(0o644)
    opened(tmp_path / "kv")
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o600


def test_another_path_or_other_tokens_are_not_found(tmp_path: Path) -> None:
    file, _ = opened(tmp_path / "kv")
    put(file)
    assert get(file, digest=path_digest(root_digest("other"), KEY)) is None
    assert get(file, key=bytes(8)) is None
    assert get(file, slot=4) is None
    assert get(file, slot=10_000) is None


@pytest.mark.parametrize("place", ["record", "block", "end"])
def test_one_flipped_bit_is_noticed(tmp_path: Path, place: str) -> None:
    file, _ = opened(tmp_path / "kv")
    put(file)
    first = LAYOUT.first_slot(file.num_slots) + 3 * LAYOUT.stride
    offset = {"record": 4096 + 3 * LAYOUT.record_bytes + 40, "block": first, "end": first + 4999}[place]
    (byte,) = os.pread(file.descriptor, 1, offset)
    os.pwrite(file.descriptor, bytes([byte ^ 4]), offset)
    assert get(file) is None


def test_a_file_that_was_cut_is_begun_anew(tmp_path: Path) -> None:
    file, _ = opened(tmp_path / "kv")
    put(file)
    file.close()
    os.truncate(tmp_path / "kv", 20_000)
    file, is_known = opened(tmp_path / "kv")
    assert not is_known
    assert list(file.records()) == []


@pytest.mark.parametrize("damage", [b"", b'{"mark": 1}', b"\xff" * 100])
def test_a_damaged_header_loses_the_blocks(tmp_path: Path, damage: bytes) -> None:
    file, _ = opened(tmp_path / "kv")
    put(file)
    file.close()
    with open(tmp_path / "kv", "r+b") as raw:
        raw.seek(len(b"penstock KV blocks 1\n"))
        raw.write(damage.ljust(1000, b"\0"))
    file, is_known = opened(tmp_path / "kv")
    assert not is_known
    assert get(file) is None


@pytest.mark.parametrize(
    "layout", [Layout("other sums", (5000, 96), 8), Layout("sums", (5000,), 8), Layout("sums", (5000, 96), 4)]
)
def test_a_file_of_other_arithmetic_or_sizes_is_begun_anew(tmp_path: Path, layout: Layout) -> None:
    file, _ = opened(tmp_path / "kv")
    put(file)
    file.close()
    file, is_known = opened(tmp_path / "kv", layout)
    assert not is_known
    assert list(file.records()) == []


def test_a_foreign_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a diary")
    with pytest.raises(ConfigError, match="not a file of KV blocks"):
        opened(tmp_path / "kv")
    assert (tmp_path / "kv").read_text() == "a diary"


def test_a_pipe_a_missing_folder_and_too_little_room_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        opened(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be opened"):
        opened(tmp_path / "missing" / "kv")
    with pytest.raises(ConfigError, match="no room for a block"):
        opened(tmp_path / "kv", size=9000)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "kv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        opened(tmp_path / "kv")
    assert (tmp_path / "elsewhere").stat().st_size == 0


def test_a_file_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").touch()
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "kv").stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        opened(tmp_path / "kv")
    assert (tmp_path / "kv").stat().st_size == 0


def test_a_second_engine_takes_the_file_beside_it(tmp_path: Path) -> None:
    first, _ = opened(tmp_path / "kv")
    second, _ = opened(tmp_path / "kv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "kv.1"]
    first.close()
    third, is_known = opened(tmp_path / "kv")
    assert is_known
    for file in (second, third):
        file.close()


def test_it_never_grows_beyond_its_size(tmp_path: Path) -> None:
    file, _ = opened(tmp_path / "kv")
    for slot in range(file.num_slots):
        put(file, slot)
    assert (tmp_path / "kv").stat().st_size <= SIZE


def test_a_peer_reads_it_while_it_is_open_and_no_other_one() -> None:
    file = open_temporary(LAYOUT, SIZE)
    put(file)
    path = f"/proc/{os.getpid()}/fd/{file.descriptor}"
    peer = open_peer(path, file.mark, LAYOUT)
    assert get(peer) == b"k" * 5000
    for mark, layout in (("another", LAYOUT), (file.mark, Layout("other sums", (5000, 96), 8))):
        with pytest.raises(FileNotFoundError):
            open_peer(path, mark, layout)
    file.close()
    assert get(peer) == b"k" * 5000, "who has it open may read on"
    with pytest.raises(FileNotFoundError):
        open_peer(path, file.mark, LAYOUT)
    peer.close()


def test_checksums_tell_words_in_another_order_apart() -> None:
    content = bytes(range(256)) * 4
    swapped = content[8:16] + content[:8] + content[16:]
    assert checksum_of(memoryview(content)) != checksum_of(memoryview(swapped))


def test_blocks_of_several_tensors_are_gathered_and_put_back() -> None:
    tensors = [torch.randn(4, 3, 2).bfloat16(), torch.randint(-9, 9, (4, 5), dtype=torch.int8)]
    blocks = GatheredBytes(tensors)
    content = bytes(blocks.read(2))
    assert len(content) == blocks.nbytes == 17

    def fill(room: memoryview) -> bool:
        room[:] = content
        return True

    assert blocks.fill(0, fill)
    assert all(torch.equal(tensor[0], tensor[2]) for tensor in tensors)
    assert not torch.equal(tensors[0][1], tensors[0][2])
