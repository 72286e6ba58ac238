"""Parts that go wrong, for the tests of `tools/gpu_day.py`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tools.gpu.parts import Facts, Part, Place, UnavailableError


def measures(place: Place) -> Iterator[Facts]:
    yield {"device": place.device}
    yield {"rows": [{"work": "a | b", "bytes": 8_000_000, "flops": 4_000, "seconds": 0.004, "exact": False}]}


def knows_the_memory(place: Place) -> Iterator[Facts]:
    yield {"memory": [{"work": "sum", "moves": "reads", "bytes": 4_000_000_000, "seconds": 1.0}]}


def knows_the_rate(place: Place) -> Iterator[Facts]:
    yield {"products": [{"type": "bf16", "flops": 1_000_000_000, "seconds": 1.0}]}


def raises(place: Place) -> Iterator[Facts]:
    yield {"before": 1}
    raise ValueError("this is wrong here")


def hangs(place: Place) -> Iterator[Facts]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    yield {"before": child.pid}
    time.sleep(300)


def dies(place: Place) -> Iterator[Facts]:
    yield {"before": 3}
    os.kill(os.getpid(), signal.SIGSEGV)


def lacks_a_package(place: Place) -> Iterator[Facts]:
    import no_such_package_anywhere  # type: ignore[import-not-found]

    yield {"never": no_such_package_anywhere}


def is_unavailable(place: Place) -> Iterator[Facts]:
    if place.device:
        raise UnavailableError("no such machine")
    yield {}


def part(name: str, section: int, *, seconds: float = 20.0, needs_gpu: bool = False) -> Part:
    function = f"tests.tools.gpu_parts:{name.replace('-', '_')}"
    return Part(name, section, f"The part {name}", function, seconds, needs_gpu)
