"""The process of a rank other than rank 0. It ends on request, on an error, or with the process of rank 0."""

import ctypes
import os
import signal
import sys
import threading

from penstock.checkpoint import open_checkpoint
from penstock.host import end_process, read_first_line
from penstock.ranks import RankJoin
from penstock.runner.ranks import RankLaunch, join_engine, run_rank

PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> int:
    """Run a rank: `python -m penstock.runner.rank_process`.

    The first line of standard input is a `RankLaunch`, or a `RankJoin` if the engine spans several nodes.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group or unit; rank 0 decides
        signal.signal(ignored, signal.SIG_IGN)
    line = read_first_line()
    join = RankJoin.decode(line)
    launch = RankLaunch.decode(line) if join is None else None
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    if (launch is None or launch.dies_with_thread) and sys.platform == "linux":  # works while stopped, too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if join is not None:
        join_engine(join)
    elif launch is not None:
        run_rank(launch, open_checkpoint(str(launch.model), hf_overrides=launch.hf_overrides), launch.group())
    return 0


def _exit_with_parent() -> None:
    # not through sys.stdin: its lock would be held by this thread while the interpreter shuts down
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    end_process(main())
