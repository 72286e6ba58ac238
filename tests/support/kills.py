"""`kill -9` between any two steps of a change of files."""

import os
import subprocess
import sys
from pathlib import Path

_KILLED = """
import os, signal, sys
from pathlib import Path

folder, steps, limit = Path(sys.argv[1]), 0, None
STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate")

def step(event, arguments):
    global steps
    if limit is not None and event in STEPS:
        steps += 1
        if steps > limit:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(step)

def killed(killed_at, change):
    # Make a change in a process that is killed before one of its steps; returns whether there was no such step.
    global limit
    if (child := os.fork()) == 0:
        limit = killed_at
        change()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0

"""


def run_killed(script: str, folder: Path) -> int:
    """Run a script that calls `killed(killed_at, change)` for 0, 1, 2 ... and prints the number at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_DATA_HOME": str(folder)}
    command = [sys.executable, "-c", _KILLED + script, str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)
