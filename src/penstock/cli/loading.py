"""Progress display while a model loads: its name, the bytes read, and finally the seconds.

loading SmolLM2-135M: LlamaForCausalLM, safetensors bfloat16, 257 MiB
reading weights:  45%|████      | 116M/257M        on a terminal; elsewhere a line every 5 s
ready in 3.2 s
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.checkpoint import Checkpoint, describe
from penstock.system.loading_progress import NUM_BYTES, TOTAL_BYTES, Intervals, progress_to

if TYPE_CHECKING:
    from tqdm import tqdm


@contextlib.contextmanager
def loading_shown(checkpoint: Checkpoint) -> Iterator[None]:
    """Context that shows on standard error the progress of loading the model."""
    began = time.monotonic()
    print(f"loading {describe(checkpoint)}", file=sys.stderr, flush=True)
    with progress_to(_Bar() if sys.stderr.isatty() else Intervals(_print)):
        yield
    print(f"ready in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _print(record: logging.LogRecord) -> None:
    print(record.getMessage(), file=sys.stderr, flush=True)


class _Bar(logging.Handler):
    _bar: "tqdm[Any] | None" = None

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        total: int = getattr(record, TOTAL_BYTES)
        if self._bar is None:
            self._bar = tqdm(
                total=total, desc="reading weights", unit="B", unit_scale=True, unit_divisor=1024, leave=False
            )
        self._bar.update(getattr(record, NUM_BYTES) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        super().close()
