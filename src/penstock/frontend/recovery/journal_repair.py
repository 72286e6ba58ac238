"""Recovers the readable rows of a damaged journal file.

SQLite stops at the first malformed page. So a table is read forwards from its beginning and backwards from its end;
the rows between are lost, and the indexes name their requests.

    requests: A B C ▒▒▒▒▒ G H I                 D E F are lost (named by the index)
    outputs:  A1 A2 B1 B2 ▒▒▒▒▒ E3 F1 F2 G1     B C D E are doubtful: some of their rows may be missing
"""

import os
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.frontend.recovery.journal_rows import HAS_RESPONSES

_MAGIC = b"SQLite format 3\0"
MALFORMED = "a page of the file is malformed"


@dataclass(slots=True)
class Salvaged:
    """Lost parts of a damaged journal: reasons by request id."""

    lost_requests: dict[str, str] = field(default_factory=dict)
    """Unfinished requests."""
    lost_results: dict[str, str] = field(default_factory=dict)
    """Ended requests."""
    num_recomputed: int = 0
    """Unfinished requests whose recorded tokens are recomputed from the first missing one on."""
    lost_responses: bool = False
    """Whether stored responses are lost; nothing tells how many."""


def begins_like_a_database(path: Path) -> bool:
    """Whether the file starts with SQLite's header."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def is_unreadable_journal(path: Path) -> bool:
    """Whether the file's content is that of a journal although its header is unreadable.

    Any other file was named by mistake and must not be touched.
    """
    if not path.exists() or begins_like_a_database(path):
        return False
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        return True
    with path.open("rb") as file:
        head = file.read(4096)
    return bool(head) and not head.strip(b"\0")


def move_aside(path: Path) -> Path:
    """Rename a damaged database and its log; returns its new name."""
    stem = f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    number = 0
    while (kept := path.with_name(stem + (f"-{number}" if number else ""))).exists():
        number += 1
    log = path.with_name(f"{path.name}-wal")
    if log.exists():
        log.rename(kept.with_name(f"{kept.name}-wal"))
    path.rename(kept)
    return kept


@dataclass(frozen=True, slots=True)
class _Table:
    """The readable rows of a table, ordered by its key: those before and those after the missing ones."""

    before: list[Any]
    after: list[Any]
    is_broken: bool

    def may_lack_rows_of(self, request_id: str) -> bool:
        """Whether rows of this request may be missing."""
        if not self.is_broken or (self.before and request_id < self.before[-1][0]):
            return False
        return not self.after or request_id <= self.after[0][0]


def salvage(old: sqlite3.Connection, new: sqlite3.Connection, part: int) -> Salvaged:
    """Copy all readable rows, except outputs that would follow a gap.

    Args:
        new: an empty journal with tables, in a transaction that the caller commits.
        part: a number above those of all parts.
    """
    salvaged = Salvaged()
    requests = _read_table(old, "requests", "id")
    outputs = _read_table(old, "outputs", "request, part")
    new.executemany("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?)", requests.before + requests.after)
    whole = [row for row in outputs.after if not outputs.may_lack_rows_of(row[0])]
    new.executemany("INSERT INTO outputs VALUES (?, ?, ?)", outputs.before + whole)
    new.executemany("INSERT INTO damaged VALUES (?, ?, ?, ?, ?, ?, ?)", _read(old, "SELECT * FROM damaged")[0])
    salvaged.lost_responses = _copy_responses(old, new)
    for request_id, ended in new.execute("SELECT id, ended FROM requests").fetchall():
        if not outputs.may_lack_rows_of(request_id):
            continue
        if ended is None:
            salvaged.num_recomputed += 1  # an unreadable part, after which outputs are not read
            new.execute("INSERT INTO outputs VALUES (?, ?, ?)", (request_id, part, b""))
        else:
            salvaged.lost_results[request_id] = MALFORMED
            _move(new, request_id)
    _name_lost_requests(old, new, salvaged)
    return salvaged


def _copy_responses(old: sqlite3.Connection, new: sqlite3.Connection) -> bool:
    """Copy the readable stored responses; returns whether some are lost."""
    if not _read(old, HAS_RESPONSES)[0]:
        return False
    responses = _read_table(old, "responses", "number")
    new.executemany("INSERT OR IGNORE INTO responses VALUES (?, ?)", responses.before + responses.after)
    return responses.is_broken


def _name_lost_requests(old: sqlite3.Connection, new: sqlite3.Connection, salvaged: Salvaged) -> None:
    """Find requests with lost rows by the indexes, and keep their outputs for inspection."""
    columns = {
        column: dict(_read(old, f"SELECT id, {column} FROM requests INDEXED BY requests_by_{index}")[0])
        for column, index in (("call", "call"), ("alias", "alias"), ("ended", "end"))
    }
    there = {request_id for (request_id,) in new.execute("SELECT id FROM requests")} | set(salvaged.lost_results)
    for request_id in sorted(set().union(*columns.values()) - there):
        lost = salvaged.lost_requests if columns["ended"].get(request_id) is None else salvaged.lost_results
        lost[request_id] = MALFORMED
        values = (request_id, columns["call"].get(request_id), columns["alias"].get(request_id))
        new.execute("INSERT INTO damaged VALUES (?, ?, ?, NULL, NULL, ?, ?)", (*values, MALFORMED, time.time()))
    for (request_id,) in new.execute("SELECT DISTINCT request FROM outputs").fetchall():
        if request_id not in there:
            _move(new, request_id)


def _move(database: sqlite3.Connection, request_id: str) -> None:
    """Move all rows of a request to the table `damaged`."""
    values = (request_id, MALFORMED, time.time())
    database.execute(
        "INSERT INTO damaged SELECT id, call, alias, NULL, record, ?2, ?3 FROM requests WHERE id = ?1", values
    )
    database.execute(
        "INSERT INTO damaged SELECT request, NULL, NULL, part, outputs, ?2, ?3 FROM outputs WHERE request = ?1", values
    )
    database.execute("DELETE FROM requests WHERE id = ?", values[:1])
    database.execute("DELETE FROM outputs WHERE request = ?", values[:1])


def _read_table(database: sqlite3.Connection, table: str, key: str) -> _Table:
    columns = key.split(", ")
    before, is_broken = _read(database, f"SELECT * FROM {table} NOT INDEXED ORDER BY {key}")
    if not is_broken:
        return _Table(before, [], False)
    backwards = ", ".join(f"{column} DESC" for column in columns)
    after, _ = _read(database, f"SELECT * FROM {table} NOT INDEXED ORDER BY {backwards}")
    known = {row[: len(columns)] for row in before}
    return _Table(before, [row for row in reversed(after) if row[: len(columns)] not in known], True)


def _read(database: sqlite3.Connection, query: str) -> tuple[list[Any], bool]:
    """The rows up to the first unreadable one, and whether there is one."""
    rows: list[Any] = []
    try:
        rows.extend(database.execute(query))  # keeps the rows before an error
    except sqlite3.Error:
        return rows, True
    return rows, False


def is_damage(error: Exception) -> bool:
    """Whether SQLite reports a malformed file or no database; transient errors are subclasses."""
    return type(error) is sqlite3.DatabaseError


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def file_identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
