"""Stored responses in the journal: what a restart, damage and eviction leave of them."""

import asyncio
import sqlite3

import pytest

from penstock.errors import JournalUnavailableError
from penstock.frontend.metrics import Metrics
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.recent_responses import RecentResponses, StoredResponse
from tests.frontend.recovery.test_journal import accept, make_entry, unfinished
from tests.frontend.recovery.test_journal_disk import LimitedFiles, until_sound

MAX_BYTES = 2**20


def make(id, parent=None, size=10):
    return StoredResponse(id, "t", parent, (f"item of {id}",), b"[]", b"x" * size)


def with_store(path, work, max_bytes=MAX_BYTES):
    """Run `work(store, metrics)` on the responses of a journal, then close it."""

    async def run():
        journal, metrics = Journal(path), Metrics()
        journal.start(metrics)
        try:
            result = work(RecentResponses(max_bytes, metrics, journal), metrics)
            await journal.flush()
            return result
        finally:
            await journal.close()

    return asyncio.run(run())


def put_three(store, metrics):
    for response in (make("r0"), make("r1", "r0"), make("r2", "r1")):
        store.put(response)


def ids(store, metrics=None):
    return [id for id in ("r0", "r1", "r2") if store.get("t", id)]


def rows(path):
    database = sqlite3.connect(path)
    try:
        return [number for (number,) in database.execute("SELECT number FROM responses ORDER BY number")]
    finally:
        database.close()


def test_the_next_server_has_all_responses_with_what_they_continue(tmp_path):
    path = tmp_path / "journal"
    with_store(path, put_three)
    chain = with_store(path, lambda store, _: store.chain("t", "r2"))
    assert chain == [make("r0"), make("r1", "r0"), make("r2", "r1")]


def test_numbers_go_on_and_deleted_responses_do_not_come_back(tmp_path):
    path = tmp_path / "journal"
    with_store(path, put_three)
    with_store(path, lambda store, _: store.delete("t", "r1"))
    with_store(path, lambda store, _: store.put(make("r1")))
    assert rows(path) == [0, 2, 3]
    assert with_store(path, ids) == ["r0", "r1", "r2"]


def test_a_server_with_less_room_keeps_what_fits_and_its_journal_no_more(tmp_path):
    path = tmp_path / "journal"
    with_store(path, put_three)
    assert len(with_store(path, ids, max_bytes=3000)) == 2
    assert len(rows(path)) == 2
    assert with_store(path, ids, max_bytes=0) == []
    assert rows(path) == []


@pytest.mark.parametrize("how", ["a bit", "cut", "a number"])
def test_a_damaged_response_is_set_aside_and_counted_and_the_others_stay(tmp_path, how, caplog):
    path = tmp_path / "journal"
    with_store(path, put_three)
    database = sqlite3.connect(path)
    (blob,) = database.execute("SELECT response FROM responses WHERE number = 1").fetchone()
    damaged = {"a bit": blob[:-1] + bytes([blob[-1] ^ 1]), "cut": blob[:20], "a number": 7}[how]
    database.execute("UPDATE responses SET response = ? WHERE number = 1", (damaged,))
    database.commit()
    database.close()

    def work(store, metrics):
        assert ids(store) == ["r0", "r2"]
        assert store.chain("t", "r2") is None
        return metrics.journal_damaged.values["response"]

    assert with_store(path, work) == 1
    assert "the response of 1 is lost from the journal" in caplog.text
    assert rows(path) == [0, 2]
    database = sqlite3.connect(path)
    ((name, kept),) = database.execute("SELECT request, content FROM damaged").fetchall()
    database.close()
    assert (name, kept) == ("response 1", damaged)
    assert with_store(path, lambda store, metrics: metrics.journal_damaged.values.get("response", 0)) == 0


def test_a_repaired_journal_keeps_the_responses_of_the_damaged_one(tmp_path):
    path = tmp_path / "journal"
    with_store(path, put_three)
    content = bytearray(path.read_bytes())
    database = sqlite3.connect(path)
    (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'requests_by_end'").fetchone()
    database.close()
    content[(page - 1) * 4096 : page * 4096] = b"\xff" * 4096
    path.write_bytes(content)

    async def read_requests():
        journal = Journal(path)
        found = await unfinished(journal)
        await journal.close()
        return found

    assert asyncio.run(read_requests()) == []
    assert list(tmp_path.glob("journal.damaged-*")), "it was repaired"
    assert with_store(path, ids) == ["r0", "r1", "r2"]


def test_of_a_damaged_table_of_responses_the_readable_ones_stay_and_the_loss_is_counted(tmp_path, caplog):
    path = tmp_path / "journal"

    def put_large(store, metrics):
        for number in range(40):
            store.put(make(f"r{number}", size=3000))

    with_store(path, put_large)
    content = bytearray(path.read_bytes())
    place = content.index(b"\xa3r20") // 4096 * 4096
    content[place : place + 4096] = bytes(4096)
    path.write_bytes(content)

    def work(store, metrics):
        kept = [number for number in range(40) if store.get("t", f"r{number}")]
        return kept, metrics.journal_damaged.values["response"]

    kept, lost = with_store(path, work)
    assert 20 not in kept
    assert len(kept) > 30
    assert lost == 1
    assert "is lost from the journal" in caplog.text


def test_what_a_full_disk_did_not_take_is_written_when_there_is_space_again(tmp_path):
    path = tmp_path / "journal"

    async def work():
        journal, metrics = Journal(path, retry_seconds=0.02), Metrics()
        journal.start(metrics)
        store = RecentResponses(MAX_BYTES, metrics, journal)
        store.put(make("r0"))
        await journal.flush()
        with LimitedFiles(tmp_path).full():
            for number in range(1, 4):
                store.put(make(f"r{number}", size=100_000))
            store.delete("t", "r3")
            with pytest.raises(JournalUnavailableError):
                await journal.flush()
            store.delete("t", "r0")
        await asyncio.wait_for(until_sound(journal), 30)
        await journal.flush()
        await journal.close()

    asyncio.run(work())
    assert with_store(path, ids) == ["r1", "r2"]
    assert rows(path) == [1, 2]


def test_a_journal_of_an_earlier_penstock_gets_the_table(tmp_path):
    path = tmp_path / "journal"

    async def write():
        journal = Journal(path)
        accept(journal, make_entry("a"))
        await journal.close()

    asyncio.run(write())
    database = sqlite3.connect(path)
    database.execute("DROP TABLE responses")
    database.commit()
    database.close()
    with_store(path, put_three)
    assert with_store(path, ids) == ["r0", "r1", "r2"]
