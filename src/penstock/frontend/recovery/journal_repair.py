"""Recovers the readable rows of a damaged journal file.

SQLite stops at the first malformed page. So a table is read forwards from its beginning and backwards from its end;
the rows between are lost, and the indexes name their requests.

    requests: A B C ▒▒▒▒▒ G H I                 D E F are lost (named by the index)
    outputs:  A1 A2 B1 B2 ▒▒▒▒▒ E3 F1 F2 G1     B C D E are doubtful: some of their rows may be missing
"""

import os
import sqlite3
import time
from collections import Counter
from dataclasses import field
from pathlib import Path
from typing import Any

from penstock.dataclass import dataclass
from penstock.frontend.recovery.journal_images import salvage_images
from penstock.frontend.recovery.journal_responses import HAS_TABLE
from penstock.frontend.recovery.journal_rows import recorded_request, request_of_outputs

_MAGIC = b"SQLite format 3\0"
MALFORMED = "a page of the file is malformed"
_INDEXES = {"call": "requests_by_call", "alias": "requests_by_alias", "ended": "requests_by_end"}


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
    """Whether stored responses are lost; their number is unknown."""
    is_empty: bool = False
    """Whether no request is readable and none is named."""


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
    # SQLite keeps a log beside a database alone, so the file was one.
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
    requests = _read_table(old, "requests", "id", (str,))
    outputs = _read_table(old, "outputs", "request, part", (str, int))
    calls, ends = _read_index(old, "call"), _read_index(old, "ended")
    rows = [_mended(row, calls, ends) for row in requests.before + requests.after]
    _insert(new, "requests", 7, rows)
    recorded = (recorded_request(row[-1]) for row in rows)
    salvage_images(
        old,
        new,
        ((request.request_id, request.images) for request in recorded if request is not None and request.images),
    )
    whole = [row for row in outputs.after if not outputs.may_lack_rows_of(row[0])]
    _insert(new, "outputs", 3, outputs.before + whole)
    _insert(new, "damaged", 7, _read(old, "SELECT * FROM damaged")[0])
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
    _name_lost_requests(old, new, salvaged, 1 if requests.is_broken else 2)
    _settle_outputs(new, salvaged, part)
    salvaged.is_empty = requests.is_broken and not (rows or salvaged.lost_requests or salvaged.lost_results)
    return salvaged


def _insert(new: sqlite3.Connection, table: str, num_columns: int, rows: list[Any]) -> None:
    """Insert rows, except those that lack a value or whose key exists."""
    new.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * num_columns)})", rows)


def _mended(row: Any, calls: dict[Any, Any], ends: dict[Any, Any]) -> Any:
    """A row of a request with the id of its record, and, where the row and an index differ, the likelier of the two.

    A call is the id of a request. What may be unfinished runs again at most, and what ended later is kept longer.
    """
    request_id, call, alias, position, accepted, ended, blob = row
    recorded = recorded_request(blob)
    request_id = request_id if recorded is None else recorded.request_id
    # The index is a second copy, on other pages.
    if request_id in calls and calls[request_id] in calls:
        call = calls[request_id]
    other = ends.get(request_id, ended)
    is_number = isinstance(ended, float) and isinstance(other, float)
    return request_id, call, alias, position, accepted, max(ended, other) if is_number else None, blob


def _copy_responses(old: sqlite3.Connection, new: sqlite3.Connection) -> bool:
    """Copy the readable stored responses; returns whether some are lost."""
    if not _read(old, HAS_TABLE)[0]:
        return False
    responses = _read_table(old, "responses", "number", (int,))
    _insert(new, "responses", 2, responses.before + responses.after)
    return responses.is_broken


def _name_lost_requests(
    old: sqlite3.Connection, new: sqlite3.Connection, salvaged: Salvaged, num_witnesses: int
) -> None:
    """Find requests with lost rows: those named by at least this many indexes."""
    columns = {column: _read_index(old, column) for column in _INDEXES}
    named = Counter(request_id for ids in columns.values() for request_id in ids if isinstance(request_id, str))
    there = {request_id for (request_id,) in new.execute("SELECT id FROM requests")} | set(salvaged.lost_results)
    for request_id in sorted({named_id for named_id, count in named.items() if count >= num_witnesses} - there):
        lost = salvaged.lost_requests if columns["ended"].get(request_id) is None else salvaged.lost_results
        lost[request_id] = MALFORMED
        values = (request_id, columns["call"].get(request_id), columns["alias"].get(request_id))
        new.execute("INSERT INTO damaged VALUES (?, ?, ?, NULL, NULL, ?, ?)", (*values, MALFORMED, time.time()))


def _read_index(database: sqlite3.Connection, column: str) -> dict[Any, Any]:
    """A column's values by the requests' ids, as its index has them."""
    return dict(_read(database, f"SELECT id, {column} FROM requests INDEXED BY {_INDEXES[column]}")[0])


def _settle_outputs(new: sqlite3.Connection, salvaged: Salvaged, part: int) -> None:
    """Keep outputs without a request for inspection. One whose id alone is damaged is a gap in those of its request."""
    ends = dict(new.execute("SELECT id, ended FROM requests").fetchall())
    orphans = "SELECT request, part, outputs FROM outputs WHERE request NOT IN (SELECT id FROM requests)"
    for request_id, number, blob in new.execute(orphans).fetchall():
        owner = request_of_outputs(blob)
        if owner is None or owner not in ends:
            if request_id not in salvaged.lost_results:
                salvaged.lost_requests.setdefault(request_id, MALFORMED)
        elif ends[owner] is not None:
            salvaged.lost_results[owner] = MALFORMED
            _move(new, owner)
        else:
            salvaged.num_recomputed += 1
            new.execute("INSERT OR REPLACE INTO outputs VALUES (?, ?, ?)", (owner, min(number, part), b""))
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


def _read_table(database: sqlite3.Connection, table: str, key: str, types: tuple[type, ...]) -> _Table:
    """Read a table but for the rows whose keys are of other types than given."""
    columns = key.split(", ")

    def read(order: str) -> tuple[list[Any], bool]:
        rows, is_broken = _read(database, f"SELECT * FROM {table} NOT INDEXED ORDER BY {order}")
        return [row for row in rows if all(map(isinstance, row, types))], is_broken

    # From both ends: a malformed page in the middle hides only the rows around it.
    before, is_broken = read(key)
    if not is_broken:
        return _Table(before, [], False)
    after, _ = read(", ".join(f"{column} DESC" for column in columns))
    known = {row[: len(columns)] for row in before}
    return _Table(before, [row for row in reversed(after) if row[: len(columns)] not in known], True)


def _read(database: sqlite3.Connection, query: str) -> tuple[list[Any], bool]:
    """The rows up to the first unreadable one, and whether there is one."""
    rows: list[Any] = []
    try:
        rows.extend(database.execute(query))  # keeps the rows before an error
    except (sqlite3.Error, UnicodeDecodeError, OverflowError):
        return rows, True
    return rows, False


def is_damage(error: Exception) -> bool:
    """Whether SQLite reports a malformed file or no database; transient errors are subclasses.

    A report that quotes damaged names is a `UnicodeDecodeError`.
    """
    return type(error) is sqlite3.DatabaseError or isinstance(error, UnicodeDecodeError)


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def file_identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
