"""Reads a journal's write-ahead log without SQLite, which silently drops everything after a damaged frame.

    header, 32 bytes    magic, version, page size, number of the log, two salts, two sums
    frame by frame      page number, pages of the file if it ends a transaction, salts, sums over all before; a page

The salts change whenever the log starts again, so they tell its frames from those of earlier logs behind them.
https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

import struct
import sys
from array import array
from pathlib import Path

from penstock.dataclass import dataclass

PAGE = 4096
"""Bytes of a journal's page: SQLite's default."""
_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGICS = {0x377F0682: "little", 0x377F0683: "big"}
"""By the byte order of the words that are summed."""


@dataclass(frozen=True, slots=True)
class Log:
    """The frames of a log up to its last whole transaction."""

    pages: list[tuple[int, bytes]]
    """Numbers, from 1 on, and contents, in the order of writing."""
    num_pages: int
    """Pages of the file after the last transaction."""
    is_damaged: bool
    """Whether SQLite would read fewer frames."""


def read_log(journal: Path) -> Log | None:
    """Read the log of a journal; None if it is missing or has no whole transaction."""
    path = journal.with_name(f"{journal.name}-wal")
    content = path.read_bytes() if path.exists() else b""
    heads = [_FRAME.unpack_from(content, start) for start in _starts(content)]
    if not heads:
        return None
    has_header = _is_header(content)
    salts = _HEADER.unpack_from(content)[4:6] if has_header else heads[0][2:4]
    of_log = [i for i, head in enumerate(heads) if head[2:4] == salts]
    ends = [i for i in of_log if heads[i][1]]
    if not ends:
        return None
    # a file does not shrink, and a number of pages may be damaged
    possible = journal.stat().st_size // PAGE + len(heads)
    num_pages = max((heads[i][1] for i in ends if heads[i][1] <= possible), default=possible)
    frames = zip(heads[: ends[-1] + 1], _starts(content), strict=False)
    pages = [(head[0], _page(content, start)) for head, start in frames if 0 < head[0] <= num_pages]
    # one damaged frame at the end may also be one that was being written
    is_damaged = not has_header or of_log[-1] > _num_sound(content, heads)
    return Log(pages, num_pages, is_damaged)


def _starts(content: bytes) -> range:
    return range(_HEADER.size, len(content) - _FRAME.size - PAGE + 1, _FRAME.size + PAGE)


def _page(content: bytes, start: int) -> bytes:
    return content[start + _FRAME.size : start + _FRAME.size + PAGE]


def _is_header(content: bytes) -> bool:
    header = _HEADER.unpack_from(content)
    if header[0] not in _MAGICS or header[2] != PAGE:
        return False
    return _sums(content[:24], _MAGICS[header[0]], (0, 0)) == header[6:]


def _num_sound(content: bytes, heads: list[tuple[int, ...]]) -> int:
    """The number of frames before the first one with other salts or sums."""
    header = _HEADER.unpack_from(content)
    order, sums = _MAGICS[header[0]], (header[6], header[7])
    for i, (head, start) in enumerate(zip(heads, _starts(content), strict=True)):
        sums = _sums(content[start : start + 8] + _page(content, start), order, sums)
        if head[2:4] != header[4:6] or head[4:6] != sums:
            return i
    return len(heads)


def _sums(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    words = array("I", data)
    if order != sys.byteorder:
        words.byteswap()
    first, second = sums
    for i in range(0, len(words), 2):
        first = (first + words[i] + second) & 0xFFFFFFFF
        second = (second + words[i + 1] + first) & 0xFFFFFFFF
    return first, second
