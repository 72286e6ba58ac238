"""A sandboxed child process that answers each request frame with a reply frame, under kernel-enforced limits.

    parent: WorkerProcess.ask(frame) ──socket──> child: frame = channel.receive(); channel.send(answer)

For third-party code: code that exceeds its CPU time or memory kills only the child, whose end of the socket is
`penstock.system.worker_channel`. The child ends with its parent: it reads EOF from the socket, and the kernel kills it
even if the code never reads the socket again.
"""

import contextlib
import socket
import subprocess
import sys
import time
import weakref
from typing import TYPE_CHECKING

from penstock.errors import EngineError
from penstock.system.host import plain_environment, start_process
from penstock.system.worker_channel import LENGTH, Incoming

if TYPE_CHECKING:
    import asyncio  # imported where a loop runs: a command without one starts 12 ms sooner

_GRACE = 1.0
"""Seconds to wait for the exit of a child that closed its socket, as the exit code tells the cause."""


class WorkerEndedError(EngineError):
    """The child did not reply: it ended, or exceeded the caller's time limit."""

    def __init__(self, exit_code: int | None) -> None:
        """
        Args:
            exit_code: of the child, negative for a signal; None: it did not reply in time, and was killed.
        """
        reason = "in time" if exit_code is None else f"and ended with exit code {exit_code}"
        super().__init__(f"a worker process gave no answer {reason}")
        self.exit_code = exit_code


class WorkerProcess:
    """A running child, for one caller at a time. It is killed with this object, and with the interpreter."""

    def __init__(self, module: str) -> None:
        """Start `python -m module` with the socket as its standard input.

        Raises:
            OSError: the process cannot be started.
        """
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", module]
                self._process = start_process(
                    command,
                    {**plain_environment(), "OPENBLAS_NUM_THREADS": "1"},  # its threads wait for each other by spinning
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt from the terminal is for the parent, which ends it
                )
        except OSError:
            self._socket.close()
            raise
        self._late = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arriving: tuple[Incoming, asyncio.Future[None]] | None = None
        self._finalize = weakref.finalize(self, _close, self._process, self._socket)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: bytes, patience: float) -> None:
        """Send a frame without a reply. If sending fails, the next `ask` fails."""
        try:
            self._socket.settimeout(patience)
            self._socket.sendall(LENGTH.pack(len(frame)) + frame)
        except OSError:
            self.kill()

    def ask(self, frame: bytes, *, longest: int, patience: float) -> bytes:
        """Send a frame and return the reply.

        Args:
            longest: maximum bytes of the reply.
            patience: seconds to wait for the reply.

        Raises:
            WorkerEndedError: there is no reply; the child has ended.
        """
        deadline = time.monotonic() + patience
        try:
            self._socket.settimeout(patience)
            self._socket.sendall(LENGTH.pack(len(frame)) + frame)
            answer = Incoming(longest)
            while answer.missing:
                # The rest of the time, for each piece: a child that sends byte by byte gets no more of it.
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                answer.add(self._socket.recv(answer.missing))
            return answer.frame
        except TimeoutError:
            self._give_up()
            raise self._ended() from None
        except (OSError, EOFError):
            raise self._ended() from None

    async def ask_from_loop(self, frame: bytes, *, longest: int, patience: float) -> bytes:
        """Like `ask`, without blocking the event loop. After a cancelled call, the child can only be killed."""
        import asyncio

        loop = asyncio.get_running_loop()
        answer, arrival = Incoming(longest), loop.create_future()
        self._arriving = answer, arrival
        if self._loop is not loop:  # once, as each registration is a system call
            self._loop = loop
            self._socket.setblocking(False)
            loop.add_reader(self._socket, self._receive)
        timer = loop.call_later(patience, self._give_up)
        try:
            await loop.sock_sendall(self._socket, LENGTH.pack(len(frame)) + frame)
            await arrival
            return answer.frame
        except (OSError, EOFError):
            loop.remove_reader(self._socket)
            # In a thread, as it waits for the child's exit.
            raise await asyncio.to_thread(self._ended) from None
        finally:
            timer.cancel()
            if not arrival.cancel() and not arrival.cancelled():
                arrival.exception()  # asyncio logs one that is not asked for, as where sending failed first

    def _receive(self) -> None:
        """Read available data: part of a reply, or EOF if the child exited, which may also be between two replies."""
        assert self._loop is not None
        assert self._arriving is not None
        answer, arrival = self._arriving
        try:
            answer.add(self._socket.recv(answer.missing or 1))
            if answer.missing:  # its length came first; more than one piece is for the next call
                answer.add(self._socket.recv(answer.missing))
            if not answer.missing and not arrival.done():
                arrival.set_result(None)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._loop.remove_reader(self._socket)
            if not arrival.done():
                arrival.set_exception(error)

    def kill(self) -> None:
        """Kill the child without waiting for its end; a pending `ask` fails."""
        self._process.kill()

    def close(self) -> None:
        """Kill the child and wait until it has exited; for the caller that has no `ask` pending."""
        self._finalize()

    def _give_up(self) -> None:
        self._late = True
        self.kill()

    def _ended(self) -> WorkerEndedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The exit code tells why: out of time, out of memory, or the parent's own kill.
            self._process.wait(_GRACE)
        self.close()
        return WorkerEndedError(None if self._late else self._process.wait())


def _close(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
