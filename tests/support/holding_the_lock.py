"""A child process that never gives up the interpreter's lock, and a parent that starts it.

python -m tests.support.holding_the_lock worker | child
"""

import os
import re
import stat
import sys
import threading
import time

from penstock.system.host import start_child
from penstock.system.parent import die_with_parent
from penstock.system.worker_channel import Channel
from penstock.system.worker_process import WorkerProcess

NAME = "tests.support.holding_the_lock"


def start(kind: str) -> None:
    """Start the child, print its process id, and wait."""
    if kind == "worker":
        worker = WorkerProcess(NAME)
        print(worker.pid, flush=True)
        worker.ask(b"", longest=100, patience=600)
    else:  # in a thread that ends
        thread = threading.Thread(target=lambda: print(start_child(NAME, b"\n").pid, flush=True))
        thread.start()
        thread.join()
        time.sleep(600)


def hold() -> None:
    if stat.S_ISSOCK(os.fstat(0).st_mode):
        channel = Channel()  # or its socket would be closed
        channel.receive()
    else:
        die_with_parent()
        os.read(0, 1)
    re.match("(.*.*)*(.*.*)*(.*.*)*Z", "x" * 100)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        start(sys.argv[1])
    else:
        hold()
