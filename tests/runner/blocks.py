"""A block in a file, for the tests of those that keep and move blocks."""

from penstock.core.stored_blocks import Record, path_digest, root_digest
from penstock.runner.block_file import BlockFile, Layout

LAYOUT = Layout("sums", (5000, 96), 8)
SIZE = 100_000
KEY = bytes(range(8))
DIGEST = path_digest(root_digest(""), KEY)


def put(file: BlockFile, slot: int = 3, content: bytes = b"k" * 5000) -> None:
    checksum = file.write_block(slot, 0, memoryview(content))
    file.write_record(Record(slot, DIGEST, root_digest(""), 0, KEY, 7, 1), [checksum, 0])
