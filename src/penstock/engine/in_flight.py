"""What an engine computes right now, and why it failed: a file that both processes map, to be read after its death.

A message would not do: it may still be on its way when the engine has ended. Writing costs a microsecond or two a step.

    [num_tokens: int64][num_requests: int64][places: int32 ...][length: int64][last words: bytes]
"""

import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

_HEAD = struct.Struct("=qq")
_LENGTH = struct.Struct("=q")
_WORDS_AT = 1 << 16
_CAPACITY = 1 << 17
_MAX_REQUESTS = (_WORDS_AT - _HEAD.size) // 4
MAX_WORDS = _CAPACITY - _WORDS_AT - _LENGTH.size
"""Bytes that last words may have."""


class InFlightStep:
    """Written by the engine's process, read by the server's."""

    def __init__(self, path: Path) -> None:
        """Map the file; it is made if it is not there.

        Raises:
            OSError: the disk is full. To write to a mapped page without a block would be the end of the process.
        """
        with open(path, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, _CAPACITY)
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _CAPACITY)

    def begin_step(self, num_tokens: int, places: Sequence[int]) -> None:
        """A step of `num_tokens` tokens begins. `places` say whose, by the order in which requests came."""
        listed = array("i", places[:_MAX_REQUESTS])
        self._memory[_HEAD.size : _HEAD.size + 4 * len(listed)] = listed.tobytes()
        _HEAD.pack_into(self._memory, 0, num_tokens, len(listed))

    def end_step(self) -> None:
        """The step is done."""
        _HEAD.pack_into(self._memory, 0, 0, 0)

    def num_tokens(self) -> int:
        """Tokens of the current step; 0 between steps."""
        num_tokens: int = _HEAD.unpack_from(self._memory)[0]
        return num_tokens

    def request_indices(self) -> list[int] | None:
        """Indices of the requests in the current step; None between steps."""
        num_tokens, count = _HEAD.unpack_from(self._memory)
        if not num_tokens:
            return None
        return array("i", self._memory[_HEAD.size : _HEAD.size + 4 * count]).tolist()

    def leave_words(self, words: bytes) -> None:
        """Store a last message before the process ends, at most `MAX_WORDS` bytes."""
        assert len(words) <= MAX_WORDS
        self._memory[_WORDS_AT + _LENGTH.size : _WORDS_AT + _LENGTH.size + len(words)] = words
        _LENGTH.pack_into(self._memory, _WORDS_AT, len(words))

    def last_words(self) -> bytes:
        """The last message of the process; empty if there is none."""
        (length,) = _LENGTH.unpack_from(self._memory, _WORDS_AT)
        return self._memory[_WORDS_AT + _LENGTH.size : _WORDS_AT + _LENGTH.size + length]

    def close(self) -> None:
        self._memory.close()
