import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import alive, wait_until


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
@pytest.mark.parametrize("kind", ["worker", "child"])
def test_a_child_that_never_gives_up_the_interpreters_lock_ends_with_its_parent_alone(kind: str) -> None:
    command = [sys.executable, "-m", "tests.support.holding_the_lock", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            wait_until(lambda: cpu_ticks(child) > 50)
            assert alive(child), "the thread that started it has ended, not the process"
            parent.kill()
            wait_until(lambda: not alive(child), 10)
        finally:
            parent.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
def test_a_child_whose_parent_ended_before_it_could_ask_ends_at_once() -> None:
    script = "from penstock.system.parent import die_with_parent; die_with_parent(); print('lives')"
    orphan = {**os.environ, "PENSTOCK_PARENT_PROCESS": str(2**22 + 1)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=orphan)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
