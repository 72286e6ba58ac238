"""Accepted requests and their tokens on disk, so that both processes may be killed and nothing accepted is lost.

    accept ──> requests (one row each) ──┐                        SQLite, WAL: one thread writes, in batches; the
    tokens ──> outputs (a row a batch) ──┴─> unfinished(), find() event loop waits only for what it asks to wait for

A request is on disk before its caller hears of it; tokens follow within `FLUSH_SECONDS`. Those that were sent but not
yet written are no loss: with the same request they are computed again. Commits survive the death of every process; to
survive a power cut as well they would have to wait for the disk.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.errors import ConfigError, EngineError
from penstock.request import Request, SequenceOutput
from penstock.sampling_params import SamplingParams

T = TypeVar("T")

logger = logging.getLogger("penstock.engine")

FLUSH_SECONDS = 0.1
KEPT_SECONDS = 3600.0
"""How long what has ended can be asked for."""
VERSION = 1  # of the tables
_TABLES = """
CREATE TABLE requests (
    id TEXT PRIMARY KEY, call TEXT NOT NULL, alias TEXT, position INTEGER NOT NULL, accepted REAL NOT NULL,
    ended REAL, record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX requests_by_call ON requests (call);
CREATE INDEX requests_by_alias ON requests (alias);
CREATE INDEX requests_by_end ON requests (ended);
CREATE TABLE outputs (request TEXT, part INTEGER, outputs BLOB NOT NULL, PRIMARY KEY (request, part)) WITHOUT ROWID;
"""

_OF_CALL = """call IN (
    SELECT call FROM requests WHERE id = ?1 OR call IN (?1, ?1 || '-0')
    UNION ALL SELECT call FROM (SELECT call FROM requests WHERE alias = ?1 ORDER BY accepted DESC LIMIT 1)
)"""


@dataclass(frozen=True, slots=True)
class Record:
    """A request as it was accepted, with what turning its tokens into an answer takes."""

    request: Request
    params: SamplingParams
    prompt: str | None
    model: str
    """Path of the checkpoint: another one would go on differently."""


@dataclass(slots=True)
class Entry:
    """A request in the journal."""

    record: Record
    call: str
    """The id of the first request of the same call."""
    position: int
    """In that call."""
    alias: str | None
    """Another name of the call, given by its caller."""
    accepted: float
    """Seconds since 1970."""
    ended: float | None = None
    outputs: list[SequenceOutput] = field(default_factory=list)


_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_outputs = msgspec.msgpack.Decoder(list[SequenceOutput]).decode


class Journal:
    """One file, for one server at a time.

    Raises:
        ConfigError: the file cannot be used: another server has it, it is no journal, or the folder is not writable.
    """

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._new: list[Entry] = []
        self._outputs: dict[str, list[SequenceOutput]] = {}
        self._ended: list[tuple[float, str]] = []
        self._flush_timer: asyncio.TimerHandle | None = None
        self._broken: sqlite3.Error | None = None
        try:
            self._database, self._part = self._thread.submit(_open, path).result()
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise ConfigError(f"the journal {path} cannot be used: {error}") from None

    def add(self, entries: Sequence[Entry]) -> None:
        """Requests were accepted. They are on disk once `flush` has been waited for."""
        self._new += entries
        self._flush_soon()

    def emitted(self, output: SequenceOutput, ended: bool) -> None:
        """A request got tokens, or an ending; `ended`: it has ended altogether."""
        self._outputs.setdefault(output.request_id, []).append(output)
        if ended:
            self._ended.append((time.time(), output.request_id))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush_in_time)

    def _flush_in_time(self) -> None:
        self._flush_timer = None
        self._submit(self._take()).add_done_callback(_look_away)

    async def flush(self) -> None:
        """Have everything so far on disk.

        Raises:
            EngineError: it cannot be written.
        """
        try:
            await self._submit(self._take())
        except sqlite3.Error as error:
            raise EngineError(f"the journal cannot be written: {error}") from None

    def _take(self) -> Callable[[], None]:
        """All that is not written yet, as the work of writing it."""
        new, outputs, ended = self._new, self._outputs, self._ended
        self._new, self._outputs, self._ended = [], {}, []
        return lambda: self._write(new, outputs, ended)

    def _submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _write(
        self, new: list[Entry], outputs: dict[str, list[SequenceOutput]], ended: list[tuple[float, str]]
    ) -> None:
        if self._broken is not None:  # no part may be missing before one that is there
            raise self._broken
        try:
            self._write_part(new, outputs, ended)
        except sqlite3.Error as error:
            self._broken = error
            logger.critical("the journal cannot be written, and new requests are not taken: %s", error)
            raise

    def _write_part(
        self, new: list[Entry], outputs: dict[str, list[SequenceOutput]], ended: list[tuple[float, str]]
    ) -> None:
        self._part += 1
        with self._database as database:
            database.executemany(
                "INSERT INTO requests VALUES (?, ?, ?, ?, ?, NULL, ?)",
                [(_id(e), e.call, e.alias, e.position, e.accepted, _encode(e.record)) for e in new],
            )
            database.executemany(
                "INSERT INTO outputs VALUES (?, ?, ?)",
                [(request_id, self._part, _encode(some)) for request_id, some in outputs.items()],
            )
            database.executemany("UPDATE requests SET ended = ? WHERE id = ?", ended)
            if self._part % 1000 == 0:
                _forget(database)

    async def find(self, name: str) -> list[Entry]:
        """The requests of a call as of now, by its name, its alias or the id of one of them; [] if it is unknown.

        Raises:
            EngineError: the journal cannot be written.
        """
        await self.flush()
        return await self._submit(lambda: self._read(_OF_CALL, name))

    def unfinished(self) -> list[Entry]:
        """The requests that have not ended, in the order in which they came. To be called at the start."""
        return self._thread.submit(lambda: self._read("ended IS NULL")).result()

    def _read(self, condition: str, *values: str) -> list[Entry]:
        rows = self._database.execute(
            f"SELECT id, call, alias, position, accepted, ended, record FROM requests WHERE {condition}"
            " ORDER BY accepted, call, position",
            values,
        ).fetchall()
        entries = []
        for request_id, call, alias, position, accepted, ended, record in rows:
            entry = Entry(_decode_record(record), call, position, alias, accepted, ended)
            parts = self._database.execute("SELECT outputs FROM outputs WHERE request = ? ORDER BY part", (request_id,))
            for (outputs,) in parts:
                entry.outputs += _decode_outputs(outputs)
            entries.append(entry)
        return entries

    async def close(self) -> None:
        """Write the rest, and let the file go."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        work = self._take()

        def finish() -> None:
            try:
                work()
            finally:
                self._database.close()

        self._submit(finish).add_done_callback(_look_away)
        await asyncio.to_thread(self._thread.shutdown)


def _id(entry: Entry) -> str:
    return entry.record.request.request_id


def _open(path: Path) -> tuple[sqlite3.Connection, int]:
    """The database, and the number of its last part."""
    path.touch(mode=0o600)  # it holds what people ask, and what they are answered
    database = sqlite3.connect(path, timeout=0)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # one server at a time; no shared memory
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0 and not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            database.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"it is not a journal of version {VERSION}")
        with database:
            _forget(database)
        (part,) = database.execute("SELECT coalesce(max(part), 0) FROM outputs").fetchone()
        return database, part
    except sqlite3.Error:
        database.close()
        raise


def _forget(database: sqlite3.Connection) -> None:
    """Drop what ended long ago."""
    long_ago = (time.time() - KEPT_SECONDS,)
    database.execute("DELETE FROM outputs WHERE request IN (SELECT id FROM requests WHERE ended < ?)", long_ago)
    database.execute("DELETE FROM requests WHERE ended < ?", long_ago)


def _look_away(written: "asyncio.Future[None]") -> None:
    """The failure was told where it happened."""
    if not written.cancelled():
        written.exception()
