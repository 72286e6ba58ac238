"""Checks a journal for damage, and copies a damaged one so that SQLite can read its remaining rows.

journal ─┐                        header and schema
log ─────┴──all frames──> copy <──of a new journal, if its own are damaged
"""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from penstock.frontend.recovery.journal_log import PAGE, read_log
from penstock.frontend.recovery.journal_rows import (
    APPLICATION_ID,
    NUM_LATER_TABLES,
    SET_VERSION,
    TABLES,
    VERSION,
    lossy_text,
)


def _plain(statement: str) -> str:
    return "".join(statement.split())


_STATEMENTS = [_plain(statement) for statement in TABLES.replace("IF NOT EXISTS ", "").split(";") if statement.strip()]
_OF_ALL_VERSIONS = _STATEMENTS[:-NUM_LATER_TABLES]
_SIZE_AT, _FORMAT_AT = 28, 18
"""Offsets in the header of the number of pages, and of the versions that say whether there is a log.
https://sqlite.org/fileformat2.html#the_database_header"""
_ORPHANS = "SELECT 1 FROM outputs WHERE request NOT IN (SELECT id FROM requests) LIMIT 1"


def check_is_journal(database: sqlite3.Connection) -> bool:
    """Whether the database is a journal that this Penstock reads; False if it is empty.

    Raises:
        sqlite3.NotSupportedError: it is something else, or of another version.
        sqlite3.DatabaseError: it is a journal with a damaged header or schema, or cannot be read.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (marked,) = database.execute("PRAGMA application_id").fetchone()
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    if not tables:
        return False
    has_requests = ("requests",) in tables
    if has_requests and 1 <= version <= VERSION and marked in (0, APPLICATION_ID + version):
        return True
    if 0 < marked - APPLICATION_ID <= VERSION and _num_known(_statements(database)) > len(_OF_ALL_VERSIONS) // 2:
        raise sqlite3.DatabaseError("its header or its schema is damaged")
    what = f"a journal of version {version}" if has_requests else "a database of something else"
    raise sqlite3.NotSupportedError(
        f"it is {what}; this Penstock reads and writes journals of version 1 to {VERSION}: "
        "name another file, or start the Penstock that wrote this one"
    )


def damage_of(database: sqlite3.Connection) -> str | None:
    """What is damaged in a journal: pages, indexes, the schema, or rows of outputs without a request; None if sound.

    Raises:
        sqlite3.DatabaseError: the damage makes the check itself fail.
    """
    if not _is_schema_sound(database):
        return "its schema is damaged"
    ((found,),) = database.execute("PRAGMA integrity_check(1)").fetchall()
    if found != "ok":
        return " ".join(str(found).split())
    return "it has outputs of an unknown request" if database.execute(_ORPHANS).fetchone() else None


def _statements(database: sqlite3.Connection) -> list[str]:
    """The database's tables and indexes."""
    return [_plain(str(sql)) for (sql,) in database.execute("SELECT sql FROM sqlite_master")]


def _num_known(statements: list[str]) -> int:
    return len(set(_OF_ALL_VERSIONS).intersection(statements))


def _is_schema_sound(database: sqlite3.Connection) -> bool:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    missing = set(_STATEMENTS).difference(_statements(database))
    later = set(_STATEMENTS[-NUM_LATER_TABLES:]) if version < VERSION else set()
    return version == 1 or missing <= later


def holds_schema(path: Path) -> bool:
    """Whether the first page of a file, perhaps with a damaged header, has most of a journal's schema."""
    with path.open("rb") as file:
        page = _plain(file.read(PAGE).decode("latin-1"))
    return sum(statement in page for statement in _OF_ALL_VERSIONS) > len(_OF_ALL_VERSIONS) // 2


@contextlib.contextmanager
def readable_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """A copy of a damaged journal and its log, deleted afterwards.

    Raises:
        OSError: it cannot be written.
    """
    copy = path.with_name(f"{path.name}.salvage")
    copy.unlink(missing_ok=True)
    copy.touch(mode=0o600)
    try:
        shutil.copyfile(path, copy)
        _merge_log(path, copy)
        if not _has_schema(copy):
            _write_schema(copy)
        with contextlib.closing(_open(copy)) as database:
            yield database
    finally:
        copy.unlink(missing_ok=True)


def _open(copy: Path) -> sqlite3.Connection:
    database = sqlite3.connect(copy, isolation_level=None)
    database.text_factory = lossy_text
    return database


def _merge_log(path: Path, copy: Path) -> None:
    log = read_log(path)
    with copy.open("r+b") as file:
        for number, page in () if log is None else log.pages:
            file.seek((number - 1) * PAGE)
            file.write(page)
        file.truncate(max(-(-file.seek(0, os.SEEK_END) // PAGE), 1) * PAGE)
        file.seek(_FORMAT_AT)
        file.write(b"\1\1")
        _write_size(file.fileno())


def _write_size(file: int) -> None:
    """Write the number of pages into the header; SQLite believes it if the counters of changes agree."""
    os.pwrite(file, (os.fstat(file).st_size // PAGE).to_bytes(4, "big"), _SIZE_AT)
    os.pwrite(file, os.pread(file, 4, 24), 92)


def _has_schema(copy: Path) -> bool:
    with contextlib.closing(_open(copy)) as database:
        try:
            return check_is_journal(database) and _is_schema_sound(database)
        except (sqlite3.Error, UnicodeDecodeError):
            return False


def _write_schema(copy: Path) -> None:
    """Replace the first page by that of a new journal, whose tables begin at the same pages."""
    new = copy.with_name(f"{copy.name}.schema")
    new.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(new)) as database:
            database.executescript(f"BEGIN; {TABLES} {SET_VERSION}; COMMIT")
        with copy.open("r+b") as file:
            file.write(new.read_bytes()[:PAGE])
            file.flush()
            _write_size(file.fileno())
    finally:
        new.unlink(missing_ok=True)
