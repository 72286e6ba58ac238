"""The child's end of a worker process: frames over its socket, and limits on its CPU time and memory.

`penstock.system.worker_process` is the parent's. A frame is its length in 8 bytes, then that many bytes. Children are
started for single requests, so this module imports little.
"""

import contextlib
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator

from penstock.system.parent import die_with_parent

LENGTH = struct.Struct("<Q")
_PIECE = 2**20


class Channel:
    """The child's end of the socket."""

    def __init__(self) -> None:
        die_with_parent()
        self._socket = socket.socket(fileno=sys.stdin.fileno())

    def receive(self) -> bytes:
        """The next frame.

        Raises:
            EOFError: the parent is gone.
        """
        frame = Incoming()
        while frame.missing:
            frame.add(self._socket.recv(frame.missing))
        return frame.frame

    def send(self, answer: bytes) -> None:
        """Answer the last frame."""
        self._socket.sendall(LENGTH.pack(len(answer)) + answer)

    def serve(self, answer: Callable[[bytes], bytes], cpu_seconds: float, *, last: bytes) -> None:
        """Answer frames until the parent is gone or memory has run out.

        Args:
            cpu_seconds: maximum CPU seconds for one answer.
            last: the answer that says so: the next frame gets another process, with its memory in one piece.
        """
        with contextlib.suppress(EOFError, OSError):  # the parent is gone
            made = b""
            while made != last:
                frame = self.receive()
                with limited_cpu_time(cpu_seconds):
                    made = answer(frame)
                self.send(made)


def limit_memory(size: int) -> None:
    """Limit this process to `size` bytes of address space, and disable core dumps."""
    # A core dump would be as large as the limit, and have the user's data in it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


@contextlib.contextmanager
def limited_cpu_time(seconds: float) -> Iterator[None]:
    """Context that limits this process's CPU time; beyond it the kernel kills the process with `SIGPROF`."""
    # The code that runs may have set a handler, and would then catch its own limit.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


class Incoming:
    """A frame being received; the buffer grows with the data, so that an announced length alone takes no memory."""

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._received = bytearray()
        self._end = LENGTH.size

    @property
    def missing(self) -> int:
        """Bytes to read next; 0 once the frame is complete."""
        return min(self._end - len(self._received), _PIECE)

    @property
    def frame(self) -> bytes:
        return bytes(self._received[LENGTH.size :])

    def add(self, piece: bytes) -> None:
        """
        Raises:
            EOFError: the other end was closed, or sent more than the maximum.
        """
        if not piece or not self.missing:
            raise EOFError
        self._received += piece
        if len(self._received) == LENGTH.size == self._end:
            (length,) = LENGTH.unpack(self._received)
            if self._longest is not None and length > self._longest:
                raise EOFError
            self._end += length
