"""A child process that answers each line on its standard input with one on its standard output.

Nothing is buffered here and no call blocks: a child that dies, stops or falls silent at any point shows as an
exception within the time given, and closing its pipes never writes to them.
"""

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence

from penstock.system.host import plain_environment, start_process

EXIT_SECONDS = 1.0
"""How long a process whose pipes have closed may take to exit before it is killed."""


class WorkerProcess:
    """Starts at once. One exchange at a time; `kill` may be called from any thread."""

    def __init__(self, command: Sequence[str]) -> None:
        """
        Raises:
            OSError: the process cannot be started.
        """
        self._process = start_process(
            command, plain_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)  # what is written may be more than there is room for
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a line and read the one that answers it, both without their newline.

        Raises:
            EOFError: the process closed its output, perhaps in the middle of a line.
            OSError: the process closed its input (BrokenPipeError), or took too long (TimeoutError).
        """
        deadline = time.monotonic() + seconds
        self._send(line + b"\n", deadline)
        return self._read_line(deadline)

    def read_line(self, seconds: float) -> bytes:
        """Read a line that the process sends unasked; errors as for `ask`."""
        return self._read_line(time.monotonic() + seconds)

    def _send(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            _wait(self._stdin, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):  # the pipe may have room for a part of the line only
                rest = rest[os.write(self._stdin, rest) :]

    def _read_line(self, deadline: float) -> bytes:
        while b"\n" not in self._received:
            _wait(self._stdout, select.POLLIN, deadline)
            data = os.read(self._stdout, 1 << 16)
            if not data:
                raise EOFError("the process closed its standard output")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def kill(self) -> None:
        """Send SIGKILL, if the process has not exited."""
        self._process.kill()

    def close(self) -> int:
        """End the process, close its pipes, and return its exit code; negative for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that has failed exits by itself, and says how
            self._process.wait(EXIT_SECONDS)
        self._process.kill()
        with self._process:
            return self._process.wait()


def _wait(pipe: int, event: int, deadline: float) -> None:
    """Wait until a pipe is ready or its other end is closed. Not with select(2), which takes no number above 1023."""
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
        raise TimeoutError("the process took too long")
