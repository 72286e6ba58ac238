"""What an engine computes right now, in a file that both processes map, so that it can be read after its death.

A message would not do: it may still be in the engine when a step kills it. Writing costs a microsecond or two a step.

    [num_tokens: int64][num_requests: int64][places: int32 ...]
"""

import mmap
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

_HEAD = struct.Struct("=qq")
_CAPACITY = 1 << 16
_MAX_REQUESTS = (_CAPACITY - _HEAD.size) // 4


class Pulse:
    """Written by the engine's process, read by the server's."""

    def __init__(self, path: Path) -> None:
        """Map the file; it is made if it is not there."""
        with open(path, "ab") as file:
            file.truncate(_CAPACITY)
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _CAPACITY)

    def begin(self, num_tokens: int, places: Sequence[int]) -> None:
        """A step of `num_tokens` tokens begins. `places` say whose, by the order in which requests came."""
        listed = array("i", places[:_MAX_REQUESTS])
        self._memory[_HEAD.size : _HEAD.size + 4 * len(listed)] = listed.tobytes()
        _HEAD.pack_into(self._memory, 0, num_tokens, len(listed))

    def end(self) -> None:
        """The step is done."""
        _HEAD.pack_into(self._memory, 0, 0, 0)

    def num_tokens(self) -> int:
        """How many tokens the step under way computes; 0 if there is none."""
        num_tokens: int = _HEAD.unpack_from(self._memory)[0]
        return num_tokens

    def under_way(self) -> list[int] | None:
        """The places of the requests in the step under way; None if there is none."""
        num_tokens, count = _HEAD.unpack_from(self._memory)
        if not num_tokens:
            return None
        return array("i", self._memory[_HEAD.size : _HEAD.size + 4 * count]).tolist()

    def close(self) -> None:
        self._memory.close()
