"""What tests wait for, and what they ask of processes."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(max(0.01, 3 * (time.monotonic() - began)))  # a condition may ask a server, which has other work
        began = time.monotonic()


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return state_of(Path(f"/proc/{pid}")) not in "ZX"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def descendants(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def stop(pid: int) -> None:
    """Stop a process, and wait until the last of its threads has stopped: one that still runs may answer."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state_of(thread) == "T" for thread in Path(f"/proc/{pid}/task").iterdir()))


def state_of(process: Path) -> str:
    """The letter that the system gives as the state of a process, or of a thread, by its folder."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]
