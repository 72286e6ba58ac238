"""The kernels' own threads."""

import json
import subprocess
import sys

import pytest

from penstock import native

SCRIPT = """
import ctypes, json, mmap, os, sys, threading, time

library = ctypes.CDLL(sys.argv[1])  # without torch, and so without an OpenMP runtime
size = 8 << 20

def compute(expected, threads=None):
    # Computes, and returns the number of threads that there are then, once those that ended are gone.
    if threads:
        library.penstock_set_threads(ctypes.c_int64(threads))
    memory = mmap.mmap(-1, size)
    library.penstock_back(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory))), ctypes.c_int64(0),
                          ctypes.c_int64(size))
    deadline = time.monotonic() + 5
    while expected and (count := len(os.listdir("/proc/self/task"))) != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return expected and count

found = {"counts": [compute(count, count) for count in (3, 1, 5, 2)]}
calling = [threading.Thread(target=compute, args=(None,)) for _ in range(4)]
for thread in calling:
    thread.start()
for thread in calling:
    thread.join()
found["after others ended"] = compute(2)
child = os.fork()
if not child:
    os._exit(compute(2))
found["of a fork"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
time.sleep(0.05)
before = time.process_time()
time.sleep(0.3)
found["idle"] = time.process_time() - before
print(json.dumps(found))
"""


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built here")
def test_each_calling_thread_has_workers_until_it_ends_a_forked_child_has_its_own_and_idle_ones_sleep() -> None:
    command = [sys.executable, "-c", SCRIPT, str(native.library_path())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(run.stdout)
    assert found.pop("idle") < 0.02
    assert found == {"counts": [3, 1, 5, 2], "after others ended": 2, "of a fork": 2}
