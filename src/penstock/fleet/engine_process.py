"""The parent's handle of one engine process, on any machine: starts, watches and ends it.

parent ──Launch──> standard input      the in-flight file and local sockets lie in a private folder, which is
       <──InFlightStep, a mapped file  removed once both ends have opened them, so that no crash leaves it behind
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from penstock.engine import protocol
from penstock.engine.in_flight import InFlightStep
from penstock.engine.protocol import Launch, in_flight_file
from penstock.errors import ConfigError, EngineDeadError
from penstock.system.parent import name_parent

MEMORY_FOLDER = "/dev/shm"
STOPPED_SECONDS = 0.2
"""Seconds that a process may be stopped (SIGSTOP) before it is killed: a whole service may be paused for a moment."""
KILL_SECONDS = 5.0
"""Seconds that a killed process may take to end. One that is stuck in the kernel (a driver, a network file system) may
never end: then nothing waits for it any longer."""


class EngineProcess:
    """An engine process, which the constructor starts.

    Create it in a thread that lives as long as the engine: the engine dies with the thread that started it.
    """

    def __init__(self, launch: Callable[[str], Launch]) -> None:
        """
        Args:
            launch: makes the engine's launch options from the path of its private folder.

        Raises:
            ConfigError: there is no room for the folder.
            EngineDeadError: the process cannot be started.
        """
        self.folder, self.in_flight = _make_folder()
        self.was_stopped = False
        """Whether the process was found stopped (SIGSTOP), and was killed for that."""
        try:
            self._process = _start(launch(self.folder))
        except OSError as error:
            self.in_flight.close()
            self.remove_folder()
            raise EngineDeadError(f"the engine's process cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Process id, also after its end."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def remove_folder(self) -> None:
        """Remove the private folder. Everything in it must be open."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def watch(self, ended: Callable[[int], None]) -> None:
        """Start a thread that waits for the process to end and calls `ended` with the exit code."""
        threading.Thread(target=lambda: ended(self.wait()), name="engine-watch", daemon=True).start()

    def wait(self) -> int:
        """Wait for the process to end; returns its exit code, negative for a signal. A stopped process is killed."""
        with contextlib.suppress(ChildProcessError):  # another call reaped it
            # A debugger stops a process for a moment, too; only one that stays stopped is killed.
            while self._is_stopped() and not self.was_stopped:
                time.sleep(STOPPED_SECONDS)
                if self._is_stopped(os.WNOHANG):
                    self.was_stopped = True
                    self._process.kill()
        return self._process.wait()

    def _is_stopped(self, options: int = 0) -> bool:
        """Wait until the process is stopped or has ended, except under `WNOHANG`; True if it is stopped."""
        change = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT | options)
        return change is not None and change.si_code == os.CLD_STOPPED

    def kill(self) -> None:
        """Kill the process."""
        if self.runs:
            self._process.kill()

    def destroy(self, patience: float = KILL_SECONDS) -> None:
        """Kill the process, wait at most `patience` seconds for its end, and free all resources; idempotent."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.in_flight.close()
        self.remove_folder()


def _start(launch: Launch) -> "subprocess.Popen[bytes]":
    # The engine imports from the same paths as this process. A session of its own keeps the terminal's Ctrl-C from it.
    # Its standard input is a pipe from this process, so it reads an end of file when this process ends.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.engine.process"],
        stdin=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"} | name_parent(),
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died already, which `wait` reports
        process.stdin.write(protocol.encode_launch(launch) + b"\n")
    return process


def _make_folder() -> tuple[str, InFlightStep]:
    """Make a private folder with an in-flight file; in memory if the disk of temporary files is full.

    Raises:
        ConfigError: there is no room on either.
    """
    try:
        return _make_folder_in(tempfile.gettempdir())
    except OSError as error:
        on_disk = error
    try:
        return _make_folder_in(MEMORY_FOLDER)
    except OSError as in_memory:
        raise ConfigError(
            f"there is no room for a folder with the engine's sockets: {on_disk}; {in_memory}. Free some space in one "
            "of the two places, or set TMPDIR to a folder that has some"
        ) from in_memory


def _make_folder_in(parent: str) -> tuple[str, InFlightStep]:
    folder = tempfile.mkdtemp(prefix="penstock-", dir=parent)
    try:
        return folder, InFlightStep(in_flight_file(folder))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
