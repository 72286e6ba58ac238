"""The process of a rank other than rank 0. It ends on request, on an error, or with the process of rank 0."""

import logging
import os
import signal
import threading

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config.ranks import RankJoin
from penstock.errors import DeviceLostError
from penstock.runner.ranks import RankLaunch, join_engine, run_rank
from penstock.system.host import end_process, read_first_line
from penstock.system.parent import die_with_parent

log = logging.getLogger(__name__)


def main() -> int:
    """Run a rank: `python -m penstock.runner.rank_process`.

    The first line of standard input is a `RankLaunch`, or a `RankJoin` if the engine spans several nodes.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group or unit; rank 0 decides
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent()
    line = read_first_line()
    join = RankJoin.decode(line)
    launch = RankLaunch.decode(line) if join is None else None
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    try:
        if join is not None:
            join_engine(join)
        elif launch is not None:
            checkpoint = open_checkpoint(str(launch.model), hf_overrides=launch.hf_overrides, mmproj=launch.mmproj)
            run_rank(launch, checkpoint, launch.group())
    except DeviceLostError as error:  # another rank is gone, whose end says why
        log.error("a rank of the engine ends: %s", error)
        return 1
    return 0


def _exit_with_parent() -> None:
    # not through sys.stdin: its lock would be held by this thread while the interpreter shuts down
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    end_process(main())
