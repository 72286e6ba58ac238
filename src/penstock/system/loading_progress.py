"""Progress of reading weights, as log records, so that the reader is independent of the display."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

LOGGER = logging.getLogger("penstock.loading")
NUM_BYTES, TOTAL_BYTES = "num_bytes", "total_bytes"
"""Keys of a record's `extra`: bytes read so far, and total bytes."""
INTERVAL = 5.0
"""Seconds between reports if there is no terminal."""
SHOWN_INTERVAL = 0.5
"""Seconds between reports of an engine to its server, which shows them to clients."""


def report_bytes(num_bytes: int, total_bytes: int) -> None:
    """Log the bytes of weights read so far."""
    mebibytes = (num_bytes >> 20, total_bytes >> 20)
    LOGGER.debug("read %d of %d MiB of weights", *mebibytes, extra={NUM_BYTES: num_bytes, TOTAL_BYTES: total_bytes})


@contextlib.contextmanager
def progress_to(handler: logging.Handler) -> Iterator[None]:
    """Context that passes progress records to a handler, and closes it at the end."""
    before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)
        handler.close()


class Intervals(logging.Handler):
    """Filter that passes at most one record per `seconds`; None: per `INTERVAL`."""

    def __init__(
        self,
        pass_on: Callable[[logging.LogRecord], None],
        clock: Callable[[], float] = time.monotonic,
        seconds: float | None = None,
    ) -> None:
        super().__init__()
        self.seconds = seconds
        self._pass_on, self._clock = pass_on, clock
        self._last = clock()

    def emit(self, record: logging.LogRecord) -> None:
        if self._clock() - self._last >= (INTERVAL if self.seconds is None else self.seconds):
            self._last = self._clock()
            self._pass_on(record)
