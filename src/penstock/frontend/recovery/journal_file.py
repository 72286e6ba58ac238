"""The journal's database: SQLite in WAL mode, used only by the journal's thread.

    write(batch) ──> unwritten rows, in order ──one transaction──> requests, outputs, responses, damaged
                     kept if that fails, and written by the next write

An unreadable row is moved to the table `damaged`. An unreadable file is renamed, and a new one gets all its readable
rows (`penstock.frontend.recovery.journal_repair`). Deleted are only requests that ended long ago, images that no
request has any more, and responses that are no longer stored.
"""

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from penstock.errors import ConfigError, JournalDamagedError
from penstock.frontend.recovery.journal_copy import check_is_journal, damage_of, holds_schema, readable_copy
from penstock.frontend.recovery.journal_images import with_pixels, write_images
from penstock.frontend.recovery.journal_log import read_log
from penstock.frontend.recovery.journal_repair import (
    MALFORMED,
    Salvaged,
    begins_like_a_database,
    beside,
    file_identity,
    is_damage,
    is_unreadable_journal,
    move_aside,
    salvage,
)
from penstock.frontend.recovery.journal_responses import read_responses, write_responses
from penstock.frontend.recovery.journal_rows import (
    LOST,
    OF_CALL,
    SET_VERSION,
    TABLES,
    VERSION,
    Damage,
    Entry,
    JournalBatch,
    add_outputs,
    decode_record,
    delete_ended,
    encode_outputs,
    lossy_text,
    transaction,
)
from penstock.frontend.recovery.recent_responses import StoredResponse

T = TypeVar("T")

logger = logging.getLogger("penstock.engine")

WRITES_PER_PRUNING = 1000
WAL_BYTES = 16 << 20
"""Maximum size of the write-ahead log after a checkpoint."""


class JournalFile:
    """The open database. All methods are called from the thread that created it."""

    def __init__(self, path: Path, kept_seconds: float) -> None:
        """
        Args:
            kept_seconds: requests that ended are deleted after this time.

        Raises:
            ConfigError: the file cannot be used: another server has it open, it is not a journal, it is of a newer
                version, or the folder is not writable.
        """
        self._path = path
        self._kept_seconds = kept_seconds
        self.num_damaged = {"request": 0, "result": 0, "tokens": 0, "response": 0}
        self._unwritten = JournalBatch()
        self._writes = 0
        self._part = 0
        self._prepared = False
        self._is_new = True
        self._identity: list[tuple[int, int] | None] = []
        self._database = sqlite3.connect(":memory:")  # until the file is open
        try:
            self._connect_or_replace()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"the journal {path} cannot be used: {error}") from None

    # ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _connect_or_replace(self) -> None:
        """Open the file; a damaged journal is moved aside and replaced by a new one.

        Raises:
            sqlite3.Error: it cannot be opened now, or is not a journal.
            OSError: the folder is missing or not writable.
        """
        repaired = beside(self._path, ".repaired")
        if repaired.exists() and not self._path.exists():  # a repair was interrupted in its last step
            repaired.rename(self._path)
        damage = self._open()
        if damage is not None:
            with readable_copy(self._path) as copy:
                self._repair(damage, copy)
        self._part = max(self._part, self._unless_damaged(self._last_part))

    def _open(self) -> str | None:
        """Open the file, which fails while another server has it; returns what is damaged, or None."""
        if is_unreadable_journal(self._path):
            return "its header is unreadable"
        log = read_log(self._path)  # before SQLite reads it
        try:
            self._connect()
            if log is not None and log.is_damaged:
                return "its write-ahead log is malformed"
            return None if self._is_new else damage_of(self._database)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if not is_damage(error) or not (begins_like_a_database(self._path) or holds_schema(self._path)):
                raise
            return str(error)

    def _connect(self) -> None:
        self._path.touch(mode=0o600)  # the file holds prompts and answers
        database = sqlite3.connect(self._path, timeout=0, isolation_level=None)
        database.text_factory = lossy_text
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")  # one server at a time; no shared memory
            self._is_new = not check_is_journal(database)
        except BaseException:
            database.close()
            raise
        self._database.close()
        self._database, self._prepared = database, False

    def _last_part(self) -> int:
        if self._is_new:
            return 0
        (part,) = self._database.execute(
            "SELECT coalesce(max(part), 0) FROM outputs WHERE typeof(part) = 'integer'"
        ).fetchone()
        return int(part)

    def _prepare(self) -> None:
        """Make the file writable: set its mode, create its tables, and delete old rows to make room."""
        database = self._database
        (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError("its write-ahead log cannot be opened")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        with transaction(database):
            for statement in TABLES.split(";"):
                database.execute(statement)
            _set_version(database)
            delete_ended(database, self._kept_seconds)
        self._identity = self._files()
        self._prepared, self._is_new = True, False

    def _files(self) -> list[tuple[int, int] | None]:
        """Device and inode of the database and of its log; None if a file does not exist."""
        return [file_identity(self._path), file_identity(beside(self._path, "-wal"))]

    def _stay_in_place(self) -> None:
        """Check that the open file is still the one at its path, and restore it if it was removed or replaced.

        Raises:
            sqlite3.Error: the file could not be restored.
            OSError: likewise.
        """
        if self._files() == self._identity:
            return
        there = file_identity(self._path)
        if there is not None and there != self._identity[0]:
            raise sqlite3.OperationalError(f"{self._path} was replaced by another file: move that away")
        logger.error("the journal %s was removed while it was open; it is restored", self._path)
        if there is None:
            copy = beside(self._path, ".copy")
            copy.unlink(missing_ok=True)
            copy.touch(mode=0o600)
            with contextlib.closing(sqlite3.connect(copy)) as database:
                self._database.backup(database)
            copy.rename(self._path)
        else:
            busy, in_log, done = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy or in_log != done:
                raise sqlite3.OperationalError("its write-ahead log was removed")
        self._database.close()
        self._connect()
        self._prepare()

    def _repair(self, damage: str, old: sqlite3.Connection) -> None:
        """Continue with a new file that contains all readable rows of the damaged one.

        Args:
            old: the damaged file, or a copy of it.

        Raises:
            sqlite3.Error: the new file cannot be written.
            OSError: likewise.
        """
        logger.critical("the journal %s is damaged: %s; what can be read of it goes to a new file", self._path, damage)
        repaired = beside(self._path, ".repaired")
        repaired.unlink(missing_ok=True)
        repaired.touch(mode=0o600)
        with contextlib.closing(sqlite3.connect(repaired, isolation_level=None)) as new:
            with transaction(new):
                for statement in TABLES.split(";"):
                    new.execute(statement)
                _set_version(new)
                self._part += 1
                # A part number above all salvaged ones: rows that are written from now on come after them.
                salvaged = salvage(old, new, self._part)
        # Only now, with the copy complete on disk: a crash before leaves the old file, one after both.
        kept = move_aside(self._path)
        self._database.close()  # before its name is reused: closing removes the log of that name
        repaired.rename(self._path)
        self._tell_losses(salvaged)
        logger.critical("the damaged journal is kept as %s", kept)
        self._connect()

    def _tell_losses(self, salvaged: Salvaged) -> None:
        if salvaged.is_empty:
            logger.critical("the journal %s was damaged beyond reading: all requests in it are lost", self._path)
            self.num_damaged["request"] += 1
        for request_id, reason in salvaged.lost_requests.items():
            self._tell_lost("request", request_id, reason)
        for request_id, reason in salvaged.lost_results.items():
            self._tell_lost("result", request_id, reason)
        self.num_damaged["tokens"] += salvaged.num_recomputed
        if salvaged.lost_responses:
            self._tell_lost("response", "an unknown number of conversations", MALFORMED)

    def _tell_lost(self, what: str, request_id: str, reason: str) -> None:
        self.num_damaged[what] += 1
        logger.error("the %s of %s is lost from the journal: %s", what, request_id, reason)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, batch: JournalBatch) -> None:
        """Queue a batch for the next write."""
        self._unwritten.merge(batch)

    @property
    def num_unwritten(self) -> int:
        """Number of requests with unwritten rows."""
        batch = self._unwritten
        return len({*batch.rows, *batch.outputs, *batch.ended})

    def write(self, batch: JournalBatch) -> None:
        """Write all queued rows in one transaction; after a failure the next call retries.

        Raises:
            sqlite3.Error: it cannot be written now.
            OSError: likewise.
        """
        self.keep(batch)
        self._unless_damaged(self._write)
        self._unwritten = JournalBatch()

    def _write(self) -> None:
        if not self._prepared:
            self._prepare()
        # SQLite would go on writing to a file without a name, and say nothing.
        self._stay_in_place()
        batch, database = self._unwritten, self._database
        self._part += 1
        with transaction(database):
            if batch.is_empty:
                database.execute(f"PRAGMA user_version = {VERSION}")  # makes this transaction access the disk, too
            self._move_damaged(batch.damage)
            rows = batch.rows.values()
            database.executemany(
                "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, NULL, ?)", [row.columns for row in rows]
            )
            write_images(database, ((row.request_id, row.images) for row in rows if row.images))
            database.executemany(
                "INSERT INTO outputs SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM requests WHERE id = ?1)",
                [(name, self._part, encode_outputs(some)) for name, some in batch.outputs.items()],
            )
            database.executemany(
                "UPDATE requests SET ended = ? WHERE id = ?", [(when, name) for name, when in batch.ended.items()]
            )
            withdrawn = [(request_id,) for request_id in batch.withdrawn]
            database.executemany("DELETE FROM outputs WHERE request = ?", withdrawn)
            database.executemany("DELETE FROM requests WHERE id = ?", withdrawn)
            write_responses(database, batch.responses, batch.damaged_responses)
        self._writes += 1
        if self._writes % WRITES_PER_PRUNING == 0:
            with contextlib.suppress(sqlite3.OperationalError), transaction(database):  # retried next time
                delete_ended(database, self._kept_seconds)

    def _move_damaged(self, damage: list[Damage]) -> None:
        now = time.time()
        for damaged in damage:
            values = (damaged.request_id, -1 if damaged.part is None else damaged.part, damaged.reason, now)
            self._database.execute(
                "INSERT INTO damaged SELECT request, NULL, NULL, part, outputs, ?3, ?4 FROM outputs"
                " WHERE request = ?1 AND part >= ?2",
                values,
            )
            self._database.execute("DELETE FROM outputs WHERE request = ? AND part >= ?", values[:2])
            if damaged.part is None:
                self._database.execute(
                    "INSERT INTO damaged SELECT id, call, alias, NULL, record, ?2, ?3 FROM requests WHERE id = ?1",
                    (damaged.request_id, damaged.reason, now),
                )
                self._database.execute("DELETE FROM requests WHERE id = ?", values[:1])

    def _unless_damaged(self, work: Callable[[], T]) -> T:
        """Run `work`; if the file turns out to be damaged, repair it and run `work` again."""
        try:
            return work()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if not is_damage(error):
                raise
            self._repair(str(error), self._database)
            return work()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def unfinished(self) -> list[Entry]:
        """The unfinished requests, in order of arrival. Their damaged rows are moved aside."""
        if self._is_new:
            return []
        return self._unless_damaged(lambda: list(self._read("ended IS NULL", (), set_tokens_aside=True)))

    def stored_responses(self) -> list[tuple[int, StoredResponse]]:
        """The stored responses with their numbers, in order. Damaged rows are moved aside."""
        if self._is_new:
            return []
        responses, damaged = self._unless_damaged(lambda: read_responses(self._database))
        for number, reason in damaged.items():
            self._tell_lost("response", str(number), reason)
        self._unwritten.damaged_responses |= damaged
        return responses

    def find(self, name: str) -> list[Entry]:
        """The requests of a call, including unwritten rows; [] if it is unknown.

        Raises:
            JournalDamagedError: part of the call is damaged and lost.
            sqlite3.Error: it cannot be read now.
        """
        if self._is_new:
            return []
        entries = self._unless_damaged(lambda: list(self._read(OF_CALL, (name,), set_tokens_aside=False)))
        lost = {damaged.request_id: damaged.reason for damaged in self._unwritten.damage if damaged.part is None}
        if self._prepared:
            lost |= dict(self._unless_damaged(lambda: self._database.execute(LOST, (name,)).fetchall()))
        calls = {entry.call for entry in entries}
        for request_id, reason in lost.items():
            if request_id in (name, f"{name}-0") or not entries or request_id in calls:
                raise JournalDamagedError(f"the journal's record of request {request_id} is damaged: {reason}")
        for entry in entries:
            request_id = entry.record.request.request_id
            entry.outputs += self._unwritten.outputs.get(request_id, ())
            entry.ended = self._unwritten.ended.get(request_id, entry.ended)
        return entries

    def _read(self, condition: str, values: tuple[str, ...], *, set_tokens_aside: bool) -> Iterator[Entry]:
        rows = self._database.execute(
            f"SELECT id, call, alias, position, accepted, ended, record FROM requests WHERE {condition}"
            " ORDER BY accepted, call, position",
            values,
        ).fetchall()
        pixels: dict[bytes, bytes] = {}
        for request_id, call, alias, position, accepted, ended, blob in rows:
            try:
                record = decode_record(blob, request_id)
                if ended is None and record.request.images:
                    record = replace(record, request=with_pixels(self._database, record.request, pixels))
                accepted, ended = float(accepted), None if ended is None else float(ended)
                if not (isinstance(call, str) and isinstance(position, int) and isinstance(alias, str | None)):
                    raise ValueError("a column is of another type")
            except (ValueError, TypeError) as error:
                self._set_aside(Damage(request_id, None, str(error)), "request" if ended is None else "result")
                continue
            entry = Entry(record, call, position, alias, accepted, ended)
            damage = self._read_outputs(entry)
            if damage is None:
                yield entry
            elif ended is not None:
                self._set_aside(Damage(request_id, None, damage.reason), "result")
            else:
                if set_tokens_aside:
                    self._set_aside(damage, "tokens")
                yield entry

    def _read_outputs(self, entry: Entry) -> Damage | None:
        """Read an entry's outputs up to the first damaged row; returns that damage, if any."""
        request = entry.record.request
        parts = self._database.execute(
            "SELECT part, outputs FROM outputs WHERE request = ? ORDER BY part", (request.request_id,)
        )
        for part, blob in parts.fetchall():
            reason = add_outputs(entry, blob)
            if reason is not None:
                return Damage(request.request_id, part, reason)
        return None

    def _set_aside(self, damage: Damage, what: str) -> None:
        if damage in self._unwritten.damage:
            return
        self._unwritten.damage.append(damage)
        self.num_damaged[what] += 1
        if what == "tokens":
            logger.error(
                "recorded tokens of request %s are damaged (%s); they are computed again",
                damage.request_id,
                damage.reason,
            )
        else:
            logger.error(
                "the journal's %s of %s is damaged (%s) and lost; it is kept in the table 'damaged' of %s",
                what,
                damage.request_id,
                damage.reason,
                self._path,
            )


def _set_version(database: sqlite3.Connection) -> None:
    for statement in SET_VERSION.split(";"):
        database.execute(statement)
