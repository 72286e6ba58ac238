"""Journal rows: the tables, the encoding of rows, and the checksums that detect damage.

0xC1 | CRC-32 of the rest, 4 bytes, big-endian | MessagePack
"""

import contextlib
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from typing import TypeVar

import msgspec

from penstock.api.request import Image, Request, SequenceOutput
from penstock.api.sampling_params import SamplingParams
from penstock.dataclass import dataclass
from penstock.frontend.recovery.journal_images import delete_unused_images, without_pixels
from penstock.frontend.recovery.recent_responses import StoredResponse

T = TypeVar("T")

VERSION = 3  # of the tables; version 2 had no images, version 1 neither checksums nor the table of damaged rows
APPLICATION_ID = int.from_bytes(b"PNJ\0", "big")
"""Plus the version it is the file's `application_id`: where the two differ, its header is damaged."""
SET_VERSION = f"PRAGMA user_version = {VERSION}; PRAGMA application_id = {APPLICATION_ID + VERSION}"
TABLES = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, call TEXT NOT NULL, alias TEXT, position INTEGER NOT NULL, accepted REAL NOT NULL,
    ended REAL, record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_by_call ON requests (call);
CREATE INDEX IF NOT EXISTS requests_by_alias ON requests (alias);
CREATE INDEX IF NOT EXISTS requests_by_end ON requests (ended);
CREATE TABLE IF NOT EXISTS outputs (
    request TEXT, part INTEGER, outputs BLOB NOT NULL, PRIMARY KEY (request, part)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS damaged (
    request TEXT NOT NULL, call TEXT, alias TEXT, part INTEGER, content BLOB, reason TEXT NOT NULL, found REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS responses (number INTEGER PRIMARY KEY, response BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS images (digest BLOB PRIMARY KEY, pixels BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS image_uses (
    request TEXT, digest BLOB, PRIMARY KEY (request, digest)
) WITHOUT ROWID;
"""
"""In `damaged`, `part` is NULL for a request's record, and `content` is NULL for an unreadable row."""
NUM_LATER_TABLES = 3
"""Number of the last tables, which a journal of an earlier version may lack."""

OF_CALL = """call IN (
    SELECT call FROM requests WHERE id = ?1 OR call IN (?1, ?1 || '-0')
    UNION ALL SELECT call FROM (SELECT call FROM requests WHERE alias = ?1 ORDER BY accepted DESC LIMIT 1)
)"""
LOST = """SELECT request, reason FROM damaged WHERE part IS NULL AND
    (request = ?1 OR call IN (?1, ?1 || '-0') OR alias = ?1 OR call IN (SELECT call FROM requests WHERE id = ?1))"""


@dataclass(frozen=True, slots=True)
class Record:
    """An accepted request, with what is needed to turn its tokens into an answer."""

    request: Request
    params: SamplingParams
    prompt: str | None
    model: str
    """Path of the checkpoint: another checkpoint would continue differently."""


@dataclass(slots=True)
class Entry:
    """A request in the journal."""

    record: Record
    call: str
    """Id of the call's first request."""
    position: int
    """Index in the call."""
    alias: str | None
    """Another name of the call, given by the caller."""
    accepted: float
    """Seconds since 1970."""
    ended: float | None = None
    outputs: list[SequenceOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """A new entry."""

    columns: tuple[str, str, str | None, int, float, bytes]
    """Id, call, alias, position, accepted, record."""
    images: tuple[Image, ...]

    @property
    def request_id(self) -> str:
        return self.columns[0]


@dataclass(frozen=True, slots=True)
class Damage:
    """Rows to move to the table of damaged rows."""

    request_id: str
    part: int | None
    """First damaged part of its outputs; None: the whole request."""
    reason: str


@dataclass(slots=True)
class JournalBatch:
    """Rows of one transaction, in the order of writing."""

    damage: list[Damage] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    outputs: dict[str, list[SequenceOutput]] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    withdrawn: set[str] = field(default_factory=set)
    """Requests that were refused after all, and leave no trace."""
    responses: dict[int, StoredResponse | None] = field(default_factory=dict)
    """Stored responses by their number; None: no longer stored."""
    damaged_responses: dict[int, str] = field(default_factory=dict)
    """Reasons by the response's number."""

    @property
    def is_empty(self) -> bool:
        requests = self.damage or self.rows or self.outputs or self.ended or self.withdrawn
        return not (requests or self.responses or self.damaged_responses)

    def merge(self, later: "JournalBatch") -> None:
        """Append a later batch."""
        self.damage += later.damage
        self.rows |= later.rows
        for request_id, outputs in later.outputs.items():
            self.outputs.setdefault(request_id, []).extend(outputs)
        self.ended |= later.ended
        self.withdrawn |= later.withdrawn
        self.responses |= later.responses
        self.damaged_responses |= later.damaged_responses
        for request_id in later.withdrawn:
            self.rows.pop(request_id, None)
            self.outputs.pop(request_id, None)
            self.ended.pop(request_id, None)


def row_of(entry: Entry) -> Row:
    """An entry's row."""
    request = entry.record.request
    record = replace(entry.record, request=without_pixels(request)) if request.images else entry.record
    blob = _with_checksum(_encode(record))
    return Row(
        (request.request_id, entry.call, entry.alias, entry.position, entry.accepted, blob),
        request.images,
    )


_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_response = msgspec.msgpack.Decoder(StoredResponse).decode
_decode_outputs = msgspec.msgpack.Decoder(list[SequenceOutput]).decode
_MARK = b"\xc1"  # not the first byte of any MessagePack, which identifies rows of version 1, without a checksum
_HEAD_BYTES = 5


def encode_outputs(outputs: list[SequenceOutput]) -> bytes:
    """Encode outputs of a request as a row."""
    return _with_checksum(_encode(outputs))


def decode_outputs(blob: bytes, request: Request) -> list[SequenceOutput]:
    """
    Raises:
        ValueError: the row is damaged, of an unknown kind, or does not match the request.
    """
    outputs = _decode(blob, _decode_outputs)
    if any(output.request_id != request.request_id or not 0 <= output.index < request.params.n for output in outputs):
        raise ValueError("it is of another request")
    return outputs


def decode_record(blob: bytes, request_id: str) -> Record:
    """
    Raises:
        ValueError: the row is damaged, of an unknown kind, or does not match the request.
    """
    record = _decode(blob, _decode_record)
    if record.request.request_id != request_id:
        raise ValueError("it is of another request")
    return record


def recorded_request(blob: bytes) -> Request | None:
    """A record's request, without pixels; None if the record is damaged."""
    try:
        return _decode(blob, _decode_record).request
    except ValueError:
        return None


def request_of_outputs(blob: bytes) -> str | None:
    """The id of the request that has the outputs of a row; None if the row is damaged."""
    try:
        return next((output.request_id for output in _decode(blob, _decode_outputs)), None)
    except ValueError:
        return None


def encode_response(response: StoredResponse) -> bytes:
    """Encode a stored response as a row."""
    return _with_checksum(_encode(response))


def decode_response(blob: bytes) -> StoredResponse:
    """
    Raises:
        ValueError: the row is damaged or of an unknown kind.
    """
    return _decode(blob, _decode_response)


def _with_checksum(content: bytes) -> bytes:
    return _MARK + zlib.crc32(content).to_bytes(4, "big") + content


def _decode(blob: bytes, decode: Callable[[bytes], T]) -> T:
    if not isinstance(blob, bytes):  # SQLite stores the type with each value
        raise ValueError("it is no longer a blob")
    content = blob
    if blob[:1] == _MARK:
        content = blob[_HEAD_BYTES:]
        if zlib.crc32(content) != int.from_bytes(blob[1:_HEAD_BYTES], "big"):
            raise ValueError("its checksum is wrong")
    try:
        return decode(content)
    except Exception as error:  # `SamplingParams`, for one, refuses unknown values
        raise ValueError(f"it cannot be decoded: {error}") from None


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # some errors have already rolled it back
            database.execute("ROLLBACK")
        raise


def delete_ended(database: sqlite3.Connection, kept_seconds: float) -> None:
    """Delete requests that ended long ago."""
    long_ago = (time.time() - kept_seconds,)
    database.execute("DELETE FROM outputs WHERE request IN (SELECT id FROM requests WHERE ended < ?)", long_ago)
    database.execute("DELETE FROM requests WHERE ended < ?", long_ago)
    delete_unused_images(database)


def lossy_text(stored: bytes) -> str:
    return stored.decode("utf-8", "replace")  # of a damaged row


def add_outputs(entry: Entry, blob: bytes) -> str | None:
    """Append a row's outputs to an entry; returns the error, or None."""
    try:
        entry.outputs += decode_outputs(blob, entry.record.request)
    except ValueError as error:
        return str(error)
    return None
