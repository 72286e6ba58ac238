"""Child processes that end with their parent. It imports little, as worker processes start for single requests."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PARENT = "PENSTOCK_PARENT_PROCESS"
"""Environment variable that holds the parent's process id, for a child."""


def name_parent() -> dict[str, str]:
    """The environment variable that names this process as the parent of a child."""
    return {_PARENT: str(os.getpid())}


def die_with_parent(ending: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, even if it hangs, is stopped or holds the GIL.

    The signal is sent at once if the parent has already ended. Has no effect on systems other than Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ending)
        if os.environ.get(_PARENT, str(os.getppid())) != str(os.getppid()):
            os.kill(os.getpid(), ending)
