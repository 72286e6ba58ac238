"""A file of blocks whose threads do one thing at a time, when a test says so; and in pieces, as real ones may."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from penstock.api.request import BlockSource
from penstock.core.block_writer import BlockAddress
from penstock.core.stored_blocks import Record
from tests.core.fakes import FakeRunner

Content = list[tuple[int, list[int]] | None]


class FakeFile:
    """What outlives an engine: records and contents by slot."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[Record, list[int]]] = {}
        self.contents: dict[tuple[int, int], Content] = {}  # by slot and cache group
        self.is_full = False


class FakeIO:
    """See `BlockIO`; moves the contents of `FakeRunner`'s blocks."""

    def __init__(self, file: FakeFile, runner: FakeRunner, peers: dict[str, FakeFile]) -> None:
        self.file, self.runner, self.peers = file, runner, peers
        self.writer: deque[Callable[[], None]] = deque()
        self.readers: list[Callable[[], None]] = []

    def source(self, slots: tuple[tuple[int, int], ...]) -> BlockSource:
        return BlockSource("own", "own", slots)

    def write(self, slot: int, group: int, block: int) -> "Future[int]":
        future: Future[int] = Future()
        half = self.runner.block_size // 2

        def begin() -> None:
            if future.set_running_or_notify_cancel():
                if self.file.is_full:
                    future.set_exception(OSError("full"))
                else:
                    content = self.runner.slots[group][block]
                    self.file.contents[slot, group] = content[:half] + self._content(slot, group)[half:]

        def end() -> None:
            if future.running():
                content = self._content(slot, group)
                self.file.contents[slot, group] = content[:half] + self.runner.slots[group][block][half:]
                future.set_result(checksum(self.file.contents[slot, group]))

        self.writer.extend((begin, end))
        return future

    def _content(self, slot: int, group: int) -> Content:
        return self.file.contents.get((slot, group), [None] * self.runner.block_size)

    def commit(self, record: Record, numbers: list[int]) -> "Future[None]":
        future: Future[None] = Future()

        def run() -> None:
            if self.file.is_full:
                future.set_exception(OSError("full"))
            else:
                self.file.records[record.slot] = record, numbers
                future.set_result(None)

        self.writer.append(run)
        return future

    def read(self, address: BlockAddress, group: int, block: int) -> "Future[bool]":
        future: Future[bool] = Future()

        def run() -> None:
            file = self.file if address.source is None else self.peers.get(address.source.file)
            record = None if file is None else file.records.get(address.slot)
            if file is None or record is None:
                future.set_exception(OSError("no such thing"))
                return
            content = file.contents.get((address.slot, group), [None] * self.runner.block_size)
            self.runner.slots[group][block] = content[:]
            right = record[0].digest == address.digest and record[0].key == address.key
            right = right and bool(record[0].groups >> group & 1)
            future.set_result(right and checksum(content) == record[1][group])

        self.readers.append(run)
        return future

    def work(self, number: int) -> None:
        """Do the next thing, of the writer or of any reader."""
        if self.readers and (number % 2 or not self.writer):
            self.readers.pop(number // 2 % len(self.readers))()
        elif self.writer:
            self.writer.popleft()()

    def close(self) -> None:
        while self.writer:
            self.writer.popleft()()


def checksum(content: Content) -> int:
    """Of what a block holds; another where any part differs."""
    return hash(str(content))
