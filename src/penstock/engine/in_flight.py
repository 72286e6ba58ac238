"""The engine's current step and last error, in a file mapped by both processes and readable after the engine's death.

A message could still be in transit when the engine dies. Writing takes a microsecond or two per step.

    [num_tokens: int64][num_requests: int64][indices: int32 ...][length: int64][last words: bytes]
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
"""Maximum bytes of the last words."""


class InFlightStep:
    """Written by the engine process, read by the server process."""

    def __init__(self, path: Path) -> None:
        """Map the file, creating it if it does not exist.

        Raises:
            OSError: the disk is full. Writing to a mapped page without a disk block would kill the process.
        """
        with open(path, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, _CAPACITY)
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _CAPACITY)

    def begin_step(self, num_tokens: int, indices: Sequence[int]) -> None:
        """Record the start of a step of `num_tokens` tokens; `indices`: its requests, numbered in order of arrival."""
        listed = array("i", indices[:_MAX_REQUESTS])
        self._memory[_HEAD.size : _HEAD.size + 4 * len(listed)] = listed.tobytes()
        _HEAD.pack_into(self._memory, 0, num_tokens, len(listed))

    def end_step(self) -> None:
        """Record the end of the step."""
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
