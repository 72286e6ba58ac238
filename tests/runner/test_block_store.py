"""Blocks of other engines on this machine: their files are open only as long as they are of use."""

import os
from pathlib import Path
from threading import Event, Thread

from penstock.api.request import BlockSource
from penstock.core.block_writer import BlockAddress
from penstock.runner.block_file import BlockFile, open_own
from penstock.runner.block_store import SharedFiles
from tests.runner.blocks import DIGEST, KEY, LAYOUT, SIZE, put


def start_engine(path: Path) -> tuple[BlockFile, BlockSource]:
    file, _ = open_own(path, LAYOUT, SIZE)
    put(file)
    return file, BlockSource(str(path), file.mark, ((3, 1),))


def end_engine(path: Path, file: BlockFile) -> None:
    file.close()
    path.unlink()


def get(peers: SharedFiles, source: BlockSource) -> bytes | None:
    room = bytearray(5000)
    return bytes(room) if peers.fetch(source, BlockAddress(3, DIGEST, KEY, source), 0, memoryview(room)) else None


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_files_of_engines_that_have_ended_are_closed(tmp_path: Path) -> None:
    peers, before = SharedFiles(LAYOUT), num_open()
    lasting, source_of_lasting = start_engine(tmp_path / "lasting")
    assert get(peers, source_of_lasting) == b"k" * 5000
    for number in range(100):
        file, source = start_engine(tmp_path / str(number))
        assert get(peers, source) == b"k" * 5000
        end_engine(tmp_path / str(number), file)
        assert get(peers, source) == b"k" * 5000, "what is open may be read on"
        assert num_open() <= before + 3, "the lasting engine's file at both ends, and the last one's"
    assert get(peers, source_of_lasting) == b"k" * 5000
    peers.close()
    lasting.close()
    assert num_open() == before


def test_a_file_that_is_being_read_is_not_closed(tmp_path: Path, monkeypatch) -> None:
    peers, reads, goes_on, answers = SharedFiles(LAYOUT), Event(), Event(), []
    file, source = start_engine(tmp_path / "ends")
    assert get(peers, source) == b"k" * 5000
    read_block = BlockFile.read_block

    def slow(self, *arguments) -> bool:
        if self.mark == source.mark:
            reads.set()
            assert goes_on.wait(60)
        return read_block(self, *arguments)

    monkeypatch.setattr(BlockFile, "read_block", slow)
    reader = Thread(target=lambda: answers.append(get(peers, source)))
    reader.start()
    assert reads.wait(60)
    end_engine(tmp_path / "ends", file)
    other, source_of_other = start_engine(tmp_path / "other")
    assert get(peers, source_of_other) == b"k" * 5000
    goes_on.set()
    reader.join()
    assert answers == [b"k" * 5000]
    peers.close()
    other.close()
