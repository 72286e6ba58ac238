"""The journal's rows of stored responses: a table of its own, which an earlier Penstock's journal lacks."""

import sqlite3
import time
from collections.abc import Mapping

from penstock.frontend.recovery.journal_rows import decode_response, encode_response
from penstock.frontend.recovery.recent_responses import StoredResponse

HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'responses'"
_MOVE = (
    "INSERT INTO damaged SELECT 'response ' || number, NULL, NULL, NULL, response, ?2, ?3 FROM responses"
    " WHERE number = ?1"
)


def read_responses(database: sqlite3.Connection) -> tuple[list[tuple[int, StoredResponse]], dict[int, str]]:
    """The readable responses with their numbers, in order, and the reason for each unreadable one, by its number."""
    responses: list[tuple[int, StoredResponse]] = []
    damaged: dict[int, str] = {}
    if database.execute(HAS_TABLE).fetchone() is None:
        return responses, damaged
    for number, blob in database.execute("SELECT number, response FROM responses ORDER BY number").fetchall():
        response = _decode_or_reason(blob)
        if isinstance(response, str):
            damaged[number] = response
        else:
            responses.append((number, response))
    return responses, damaged


def _decode_or_reason(blob: bytes) -> StoredResponse | str:
    try:
        return decode_response(blob)
    except ValueError as error:
        return str(error)


def write_responses(
    database: sqlite3.Connection, responses: Mapping[int, StoredResponse | None], damaged: Mapping[int, str]
) -> None:
    """Write new responses, delete those that are None, and move damaged rows; within a transaction."""
    now = time.time()
    database.executemany(_MOVE, [(number, reason, now) for number, reason in damaged.items()])
    gone = [number for number, response in responses.items() if response is None]
    database.executemany("DELETE FROM responses WHERE number = ?", [(number,) for number in (*damaged, *gone)])
    database.executemany(
        "INSERT OR IGNORE INTO responses VALUES (?, ?)",
        [(number, encode_response(response)) for number, response in responses.items() if response is not None],
    )
