"""A command on a pseudo-terminal, as a person uses it."""

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time


class Terminal:
    """A command of `penstock` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        attributes = termios.tcgetattr(theirs)
        attributes[3] |= termios.NOFLSH  # or the kernel drops output that is not read yet when Ctrl-C is typed
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        self.shown = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},  # this terminal tells no positions
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """What is shown until the text, from the last wait's end on."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            readable, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, self.shown
            self.shown += os.read(self._ours, 65536).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def read_until(self, count: int) -> None:
        """Read until this many characters are shown since the last wait's end."""
        while len(self.shown) < count:
            self.shown += os.read(self._ours, 100).decode(errors="replace")

    def end(self) -> int:
        try:
            while os.read(self._ours, 65536):
                pass
        except OSError:  # the other end is closed
            pass
        os.close(self._ours)
        return self._process.wait(60)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
