"""Recorded traffic: traces in Mooncake's format, and the server's own journal.

Mooncake (Qin et al., arXiv 2407.00079) publishes a JSON object a line: `timestamp` in milliseconds, `input_length` and
`output_length` in tokens, and `hash_ids`, one per 512 tokens of the prompt. Equal leading ids mean an equal prefix, so
shared prefixes are known without the text. Optional: `tenant`, and `images`, objects with `start` and `tokens`
in the prompt, and `height` and `width` in pixels; images in the place of equal tokens are equal.
"""

import hashlib
import json
import math
import sqlite3
from array import array
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.api.request import Image
from penstock.dataclass import dataclass
from penstock.errors import ConfigError
from penstock.frontend.recovery.journal_rows import decode_outputs, decode_record
from penstock.simulator.workload import ANY_TOKEN, INT32, Arrival, make_tokens

HASH_BLOCK = 512
"""Number of tokens per hash id."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file at their recorded times, independent of the answers (an open loop)."""

    path: Path
    requests: tuple[Arrival, ...]

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.requests)

    def describe(self) -> str:
        return f"{len(self.requests):,} requests of {self.path.name}"


def read_trace(path: Path, *, speed: float = 1.0, most: int | None = None, vocab_size: int = ANY_TOKEN) -> Trace:
    """Read a trace or a journal.

    Args:
        speed: finite factor by which requests arrive faster than recorded.
        most: maximum number of requests, from the beginning.

    Raises:
        ConfigError: the file cannot be read, or is neither.
    """
    if not 0 < speed < math.inf:
        raise ConfigError(f"speed must be a finite number above 0, not {speed:g}")
    try:
        with path.open("rb") as file:
            is_database = file.read(16) == b"SQLite format 3\0"
        found = _read_journal(path) if is_database else _read_lines(path, vocab_size, most)
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"the trace {path} contains no request")
    found.sort(key=lambda arrival: arrival.time)
    first = found[0].time
    for arrival in found:
        arrival.time = (arrival.time - first) / speed
    return Trace(path, tuple(found[:most]))


def _read_lines(path: Path, vocab_size: int, most: int | None) -> list[Arrival]:
    make_block = lru_cache(4096)(lambda hash_id: make_tokens(hash_id, HASH_BLOCK, vocab_size))
    found: list[Arrival] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and (most is None or len(found) < most):
                try:
                    found.append(_arrival(json.loads(line), number, make_block, vocab_size))
                except (ValueError, TypeError, KeyError, OverflowError) as error:
                    raise ConfigError(
                        f"{path}, line {number}: not a request of Mooncake's schema, a JSON object with timestamp "
                        f"(ms), input_length, output_length and hash_ids: {type(error).__name__}: {error}"
                    ) from None
    return found


def _arrival(line: Any, number: int, make_block: Any, vocab_size: int) -> Arrival:
    if not isinstance(line, dict):
        raise ValueError("it is not an object")
    length, answer = int(line["input_length"]), int(line["output_length"])
    milliseconds = float(line["timestamp"])
    if not math.isfinite(milliseconds):
        raise ValueError(f"its timestamp is {milliseconds}")
    hash_ids = [int(hash_id) for hash_id in line["hash_ids"]]
    if length < 1 or answer < 0 or len(hash_ids) > -(-length // HASH_BLOCK):
        raise ValueError(f"{length} tokens of {len(hash_ids)} blocks of {HASH_BLOCK}, {answer} of the answer")
    own = -number  # text that no other request has
    prompt = array(INT32)
    for hash_id in hash_ids:
        prompt.extend(make_block(hash_id))
    prompt = prompt[:length] + make_tokens(2 * own, max(0, length - len(prompt)), vocab_size)
    images = tuple(_image(image, prompt) for image in line.get("images", ()))
    if any(after.start < before.start + before.count for before, after in pairwise(images)):
        raise ValueError("its images overlap")
    return Arrival(
        milliseconds / 1000,
        f"{number}",
        prompt,
        make_tokens(2 * own + 1, max(1, answer), vocab_size),
        tenant=str(line.get("tenant", "")),
        images=images,
    )


def _image(described: Any, prompt: "array[int]") -> Image:
    start, count, height, width = (int(described[name]) for name in ("start", "tokens", "height", "width"))
    if min(count, height, width) < 1 or not 0 <= start <= len(prompt) - count:
        raise ValueError(f"an image of {height} x {width} pixels and {count} tokens from {start} on")
    digest = hashlib.sha256(repr((height, width)).encode() + prompt[start : start + count].tobytes()).digest()
    return Image(start, count, 1, count, height, width, digest, b"")


def _read_journal(path: Path) -> list[Arrival]:
    """The ended requests of a journal, with each choice as a request of its own."""
    found: list[Arrival] = []
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        rows = database.execute("SELECT id, accepted, record FROM requests WHERE ended IS NOT NULL").fetchall()
        for request_id, accepted, record in rows:
            request = decode_record(record, request_id).request
            tokens: dict[int, array[int]] = {}
            parts = database.execute("SELECT outputs FROM outputs WHERE request = ? ORDER BY part", (request_id,))
            for (outputs,) in parts.fetchall():
                for output in decode_outputs(outputs, request):
                    tokens.setdefault(output.index, array(INT32)).extend(output.token_ids)
            for index, answer in sorted(tokens.items()):
                if answer:
                    found.append(
                        Arrival(
                            accepted,
                            f"{request_id}/{index}",
                            array(INT32, request.prompt_token_ids),
                            answer,
                            tenant=request.tenant,
                            namespace=request.namespace,
                            priority=request.priority,
                            images=request.images,
                        )
                    )
    except ValueError as error:
        raise ConfigError(f"the journal {path} is damaged: {error}") from None
    finally:
        database.close()
    return found
