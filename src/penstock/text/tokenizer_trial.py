"""Checks in a worker process that loading a tokenizer.json stays within bounds.

`tokenizers` takes up to 350 bytes of memory per byte of the file, and aborts the process on files that nest too deeply;
the cost of a file shows only when it is loaded. Run as `python -m penstock.text.tokenizer_trial FILE`.
"""

import subprocess
import sys
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.system.host import plain_environment, start_process
from penstock.system.parent import die_with_parent
from penstock.system.worker_channel import limit_memory, limited_cpu_time

MEMORY_BYTES = 2**30
"""Maximum address space for loading; the largest tokenizers in use take half of it."""
CPU_SECONDS = 60.0
_READ, _REFUSED = 0, 3
"""Exit codes: loaded; refused by `tokenizers`, with a reason."""


def try_tokenizer(file: Path) -> None:
    """Load the file in a worker process. A file that `tokenizers` refuses passes: loading it here raises the error.

    Raises:
        CheckpointError: loading exceeds the limit on memory or time.
    """
    command = [sys.executable, "-m", "penstock.text.tokenizer_trial", str(file)]
    null = subprocess.DEVNULL
    with start_process(command, plain_environment(), stdin=null, stdout=null, stderr=null) as run:
        run.wait()
    if run.returncode not in (_READ, _REFUSED):
        raise CheckpointError(
            f"{file} cannot be loaded within {MEMORY_BYTES >> 20} MiB of memory and {CPU_SECONDS:g} s of processor "
            f"time: the process that tried it ended with exit code {run.returncode}"
        )


def main() -> int:
    """Load the file named by the first argument; the exit code tells the outcome."""
    die_with_parent()
    from tokenizers import Tokenizer  # here: it is not needed to start the process

    limit_memory(MEMORY_BYTES)
    with limited_cpu_time(CPU_SECONDS):
        try:
            Tokenizer.from_file(sys.argv[1])
        except MemoryError:
            raise
        except Exception:
            return _REFUSED
    return _READ


if __name__ == "__main__":
    sys.exit(main())
