"""The process of a rank other than the first. It ends on request, on an error, or with the first rank's process."""

import ctypes
import os
import signal
import sys
import threading

from penstock.checkpoint import open_checkpoint
from penstock.host import end_process, read_first_line
from penstock.ranks import RankJoin
from penstock.runner.ranks import RankLaunch, come, follow

PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> int:
    """Run as `python -m penstock.runner.rank_process`, with a `RankLaunch`, or a `RankJoin` of an engine on several
    nodes, as the first line of standard input.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group or unit; the first rank decides
        signal.signal(ignored, signal.SIG_IGN)
    line = read_first_line()
    join = RankJoin.decode(line)
    launch = RankLaunch.decode(line) if join is None else None
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    if (launch is None or launch.dies_with_thread) and sys.platform == "linux":  # also while it is stopped
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if join is not None:
        come(join)
    elif launch is not None:
        follow(launch, open_checkpoint(str(launch.model)), launch.group())
    return 0


def _exit_with_parent() -> None:
    # not through sys.stdin: its lock would be held by this thread while the interpreter shuts down
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    end_process(main())
