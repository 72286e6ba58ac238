"""The bodies of open calls: a bound on all of them together, and their memory given back when the calls end."""

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import Iterator

from penstock.frontend.limits import SharedLimit
from penstock.server.large_bodies import LARGE_BODY

RETURN_SECONDS = 1.0
"""After the end of a call with a large body, until the allocator returns what is free; not more often than that."""


class HeldBody:
    """What one call's body holds."""

    def __init__(self, limit: SharedLimit, name: str) -> None:
        self._limit = limit
        self._name = name
        self._size = 0
        self.counted = 0

    def grow(self, size: int) -> bool:
        """Count so much more, if there is room for it."""
        self._size += size
        if self._size < LARGE_BODY:
            return True
        more = self._size - self.counted
        if not self._limit.fits(more, self._name):
            return False
        self._limit.take(more, self._name)
        self.counted = self._size
        return True

    def release(self) -> None:
        self._limit.take(-self.counted, self._name)
        self.counted = self._size = 0


class HeldBodies:
    """All of a server's; small ones do not count."""

    def __init__(self, max_bytes: int) -> None:
        self._limit = SharedLimit(max_bytes)
        self._returns_soon = False

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[HeldBody]:
        """A call's body, for as long as the call is open; `name` is that of its API key."""
        held = HeldBody(self._limit, name)
        try:
            yield held
        finally:
            if held.counted:
                held.release()
                self._return_memory_soon()

    def _return_memory_soon(self) -> None:
        if not self._returns_soon:
            self._returns_soon = True
            asyncio.get_running_loop().call_later(RETURN_SECONDS, self._return_memory)

    def _return_memory(self) -> None:
        self._returns_soon = False
        asyncio.get_running_loop().run_in_executor(None, _trim_heaps)


def _trim_heaps() -> None:
    """Return free memory from anywhere in glibc's heaps; `free` returns only what lies at their ends."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
