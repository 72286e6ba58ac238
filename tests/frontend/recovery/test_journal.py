"""The journal: what is in it after the death of whoever wrote it."""

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.api.request import FinishReason, Request, SequenceOutput, TokenLogprob
from penstock.api.sampling_params import ResolvedParams, SamplingParams
from penstock.errors import ConfigError
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import Entry, Record, row_of
from tests.core.images import make_image


def make_entry(request_id, call=None, position=0, alias=None, accepted=1000.0, **params):
    given = SamplingParams(seed=2**64 - 1, stop=["\n"], logprobs=1, **params)
    resolved = ResolvedParams(given.n, 0.7, 0, 1.0, 0.0, 2**64 - 1, 50, 0, (2,), 1)
    request = Request(request_id, (5, 6, 7), resolved, 12.5, priority=-1, namespace="n", tenant="t")
    return Entry(Record(request, given, "text", "/model"), call or request_id, position, alias, accepted)


def tokens(request_id, *token_ids, ending=None):
    logprobs = [TokenLogprob(token, float("-inf"), ((1, -0.5),)) for token in token_ids]
    return SequenceOutput(request_id, 0, list(token_ids), logprobs, ending)


def accept(journal, *entries):
    journal.add_entries([row_of(entry) for entry in entries])


def run(work):
    return asyncio.run(work())


async def reopened(path, read, **options):
    journal = Journal(path, **options)
    try:
        return await read(journal)
    finally:
        await journal.close()


async def unfinished(journal):
    return journal.unfinished()


def test_what_was_accepted_and_emitted_is_read_back_to_the_letter(tmp_path):
    async def work():
        journal = Journal(tmp_path / "journal")
        entry = make_entry("a", alias="mine")
        accept(journal, entry)
        journal.emitted(tokens("a", 1), ended=False)
        await journal.flush()
        journal.emitted(tokens("a", 2, 3), ended=False)
        await journal.close()
        (read,) = await reopened(tmp_path / "journal", unfinished)
        assert read.outputs == [tokens("a", 1), tokens("a", 2, 3)]
        read.outputs = []
        assert read == entry

    run(work)


def with_images(entry, *images):
    return replace(entry, record=replace(entry.record, request=replace(entry.record.request, images=images)))


def test_an_image_or_a_sound_is_on_disk_once_comes_back_with_its_request_and_goes_with_the_last_that_has_it(tmp_path):
    path, picture, other = tmp_path / "journal", replace(make_image(1), is_sound=True), make_image(2)

    async def work():
        journal = Journal(path, kept_seconds=0.0)
        entries = [
            with_images(make_entry(name, accepted=1.0), *of) for name, of in (("a", [picture, other]), ("b", [picture]))
        ]
        accept(journal, *entries)
        await journal.flush()
        journal.emitted(tokens("a", 1, ending=FinishReason.LENGTH), ended=True)
        await journal.close()
        with contextlib.closing(sqlite3.connect(path)) as database:
            stored = database.execute("SELECT digest, pixels FROM images ORDER BY digest").fetchall()
            (record,) = database.execute("SELECT record FROM requests WHERE id = 'b'").fetchone()
        assert stored == sorted((one.digest, one.pixels) for one in (picture, other))
        assert picture.pixels not in record
        await asyncio.sleep(0.01)
        assert await reopened(path, unfinished, kept_seconds=0.0) == [entries[1]]
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT digest FROM images").fetchall() == [(picture.digest,)]
            database.execute("UPDATE images SET pixels = zeroblob(4)")
            database.commit()
        assert await reopened(path, unfinished) == [], "another picture would have another answer"

    run(work)


def test_only_what_has_not_ended_is_unfinished_in_the_order_it_came(tmp_path):
    async def work():
        journal = Journal(tmp_path / "journal")
        accept(journal, make_entry("z", accepted=1.0), make_entry("b", accepted=2.0), make_entry("a", accepted=3.0))
        journal.emitted(tokens("b", 1, ending=FinishReason.LENGTH), ended=True)
        await journal.close()
        assert [e.record.request.request_id for e in await reopened(tmp_path / "journal", unfinished)] == ["z", "a"]

    run(work)


def test_a_call_is_found_by_its_requests_its_name_and_the_latest_of_its_alias(tmp_path):
    async def work():
        journal = Journal(tmp_path / "journal")
        accept(journal, make_entry("c-0", "c-0", 0, "mine"), make_entry("c-1", "c-0", 1, "mine"))
        accept(journal, make_entry("d", alias="mine", accepted=2000.0), make_entry("e"))
        found = {}
        for name in ("c", "c-0", "c-1", "d", "mine", "nothing"):
            found[name] = [e.record.request.request_id for e in await journal.find(name)]
        await journal.close()
        both = ["c-0", "c-1"]
        assert found == {"c": both, "c-0": both, "c-1": both, "d": ["d"], "mine": ["d"], "nothing": []}

    run(work)


def test_parts_written_by_several_servers_keep_their_order(tmp_path):
    async def work():
        journal = Journal(tmp_path / "journal")
        accept(journal, make_entry("a"))
        for token in range(3):
            journal.emitted(tokens("a", token), ended=False)
            await journal.flush()
        await journal.close()

        async def go_on(journal):
            journal.emitted(tokens("a", 3), ended=True)
            return await journal.find("a")

        (entry,) = await reopened(tmp_path / "journal", go_on)
        assert [output.token_ids for output in entry.outputs] == [[0], [1], [2], [3]]
        assert entry.ended is not None

    run(work)


def test_what_was_flushed_survives_kill_9_and_what_was_emitted_does_within_a_moment(tmp_path):
    script = f"""
import asyncio, os, signal
from pathlib import Path
from penstock.frontend.recovery.journal import Journal
from tests.frontend.recovery.test_journal import accept, make_entry, tokens

async def work():
    journal = Journal(Path({str(tmp_path / "journal")!r}))
    accept(journal, make_entry("a"), make_entry("b"))
    journal.emitted(tokens("a", 9), ended=False)
    await journal.flush()
    journal.emitted(tokens("b", 8), ended=True)
    while journal._batch.outputs or journal._timer:
        await asyncio.sleep(0.01)
    await journal._submit(lambda: None)  # its one thread has written what it was given
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(work())
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    (entry,) = run(lambda: reopened(tmp_path / "journal", unfinished))
    assert (entry.record.request.request_id, entry.outputs) == ("a", [tokens("a", 9)])


def test_nobody_else_may_read_it_and_one_server_at_a_time_may_use_it(tmp_path):
    async def work():
        journal = Journal(tmp_path / "journal")
        assert (tmp_path / "journal").stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="locked"):
            Journal(tmp_path / "journal")
        await journal.close()
        await reopened(tmp_path / "journal", unfinished)

    run(work)


def test_a_file_of_another_kind_is_left_alone(tmp_path):
    (tmp_path / "text").write_text("no database, but long enough to look for its header\n" * 100)
    for path in (tmp_path / "text", tmp_path / "no-folder" / "journal"):
        with pytest.raises(ConfigError, match="cannot be used"):
            Journal(path)
    assert (tmp_path / "text").read_text().startswith("no database")


def test_what_ended_long_ago_is_forgotten(tmp_path):
    async def work():
        journal = Journal(tmp_path / "journal")
        accept(journal, make_entry("old"), make_entry("open"))
        journal.emitted(tokens("old", 1), ended=True)
        await journal.close()

        async def names(journal):
            return [len(await journal.find(name)) for name in ("old", "open")]

        assert await reopened(tmp_path / "journal", names, kept_seconds=-1.0) == [0, 1]

    run(work)
