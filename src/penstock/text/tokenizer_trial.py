"""Whether a tokenizer.json can be loaded within bounds, found out by a process of its own.

The library takes up to 350 bytes of memory for a byte of the file, and ends the process on some that nest too deeply;
what a file takes shows only when it is loaded. Run as `python -m penstock.text.tokenizer_trial FILE`.
"""

import subprocess
import sys
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.system.host import die_with_parent, plain_environment, start_process
from penstock.system.worker_process import limit_memory, limited_cpu_time

MEMORY_BYTES = 2**30
"""Address space that loading may take; of the tokenizers in use the largest take half of that."""
CPU_SECONDS = 60.0
_READ, _REFUSED = 0, 3
"""Exit codes: loaded; refused by the library, with a reason."""


def try_tokenizer(file: Path) -> None:
    """Load it in another process. What the library refuses, it will refuse again.

    Raises:
        CheckpointError: loading it takes too much memory or time.
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
    """Load the file that the first argument names; the exit code says how that ended."""
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
