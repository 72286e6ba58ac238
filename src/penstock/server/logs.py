"""The server's log: text lines or JSON, written by its own thread.

Lines go into a bounded queue, so that no request waits for a slow reader of the log; lines that do not fit are counted.
"""

import contextlib
import json
import logging
import logging.handlers
import queue
import time
from collections.abc import Iterator
from typing import Any, TextIO

CAPACITY = 10_000
FIELDS = "fields"
"""Name of the `extra` of a log call that holds its fields as a dict."""


class TextFormatter(logging.Formatter):
    """`2026-01-31T23:59:59.123Z INFO penstock.server: message name=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {super().format(record)}"
        facts: dict[str, Any] = getattr(record, FIELDS, {})
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in facts.items() if value is not None)])


def _time(record: logging.LogRecord) -> str:
    """UTC, to the millisecond."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{at}.{int(record.msecs):03}Z"


def _shown(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, the call's fields and, after a failure, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        shown = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown | getattr(record, FIELDS, {}), default=str)


class _Queue(logging.handlers.QueueHandler):
    """Drops lines that do not fit, and logs their number once there is room."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped:
                message = f"{self.dropped} lines of the log were dropped: its reader is too slow"
                note = logging.LogRecord("penstock.server", logging.WARNING, "", 0, message, None, None)
                self.queue.put_nowait(note)
                self.dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


@contextlib.contextmanager
def logging_to(stream: TextIO, level: str, *, as_json: bool, capacity: int = CAPACITY) -> Iterator[None]:
    """Log to a stream during the block, and write all remaining lines at its end."""
    target = logging.StreamHandler(stream)
    target.setFormatter(JsonFormatter() if as_json else TextFormatter())
    lines: "queue.Queue[logging.LogRecord]" = queue.Queue(capacity)
    handler = _Queue(lines)
    listener = logging.handlers.QueueListener(lines, target)
    root = logging.getLogger()
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        listener.stop()
