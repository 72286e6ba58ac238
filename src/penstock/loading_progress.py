"""The progress of reading weights, as records of a logger: the reader need not know who shows them."""

import logging

LOGGER = logging.getLogger("penstock.loading")
NUM_BYTES, TOTAL_BYTES = "num_bytes", "total_bytes"
"""Names of a record's `extra`: bytes read so far, and in all."""


def report_bytes(num_bytes: int, total_bytes: int) -> None:
    """Log how much of the weights has been read."""
    mebibytes = (num_bytes >> 20, total_bytes >> 20)
    LOGGER.debug("read %d of %d MiB of weights", *mebibytes, extra={NUM_BYTES: num_bytes, TOTAL_BYTES: total_bytes})
