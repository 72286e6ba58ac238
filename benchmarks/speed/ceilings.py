"""The machine's ceilings, measured: what kernels are compared with. Needs a C++ compiler.

python -m benchmarks.speed.ceilings
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("ceilings.cpp")


def measure(threads: int) -> dict[str, float]:
    """Bytes a second ("read") and operations a second: "float32", and "int16", "int8", "bfloat16" where it has them."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ceilings"
        command = [
            os.environ.get("CXX", "c++"),
            "-O2",
            "-std=c++17",
            "-mavx2",
            "-pthread",
            str(SOURCE),
            "-o",
            str(program),
        ]
        subprocess.run(command, check=True)
        done = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


if __name__ == "__main__":
    for name, rate in measure(len(os.sched_getaffinity(0))).items():
        print(f"{name:<8} {rate / 1e9:8.1f} {'GB/s' if name == 'read' else 'G operations/s'}")
