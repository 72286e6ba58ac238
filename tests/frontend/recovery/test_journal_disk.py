"""The journal and its disk: full from the start or for a while, files removed, replaced or damaged."""

import asyncio
import contextlib
import os
import random
import resource
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.api.request import FinishReason
from penstock.errors import ConfigError, JournalDamagedError, JournalUnavailableError
from penstock.frontend.metrics import Metrics
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import APPLICATION_ID
from tests.frontend.recovery.test_journal import accept, make_entry, reopened, run, tokens, unfinished

RETRY = 0.02


class LimitedFiles:
    """A disk on which no file may grow, for this process alone: what a quota does, and needs no root."""

    def __init__(self, folder):
        self.folder = folder

    @contextlib.contextmanager
    def full(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        largest = max((file.stat().st_size for file in self.folder.iterdir()), default=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class SmallDisk:
    """A file system of its own, filled to the last byte."""

    def __init__(self, folder):
        self.folder = folder

    @contextlib.contextmanager
    def full(self):
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(self.folder).f_bavail == 0
        yield
        filler.unlink()


@pytest.fixture(params=[LimitedFiles, SmallDisk])
def disk(request, tmp_path):
    if request.param is LimitedFiles:
        yield LimitedFiles(tmp_path)
        return
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def until_sound(journal):
    while journal.write_error is not None:
        await asyncio.sleep(0.01)


def test_what_a_full_disk_did_not_take_is_written_when_there_is_space_again(disk, caplog):
    caplog.set_level("INFO")

    async def work():
        journal, metrics = Journal(disk.folder / "journal", retry_seconds=RETRY), Metrics()
        journal.start(metrics)
        accept(journal, make_entry("a"))
        journal.emitted(tokens("a", 1), ended=False)
        await journal.flush()
        with disk.full():
            journal.emitted(tokens("a", *range(200_000)), ended=False)
            with pytest.raises(JournalUnavailableError, match=r"full|disk I/O error"):
                await journal.flush()
            journal.emitted(tokens("a", 2, ending=FinishReason.LENGTH), ended=True)
            accept(journal, make_entry("b"))
            with pytest.raises(JournalUnavailableError):
                await journal.flush()
            journal.withdraw(["b"])
            (entry,) = await journal.find("a")
            assert [len(output.token_ids) for output in entry.outputs] == [1, 200_000, 1]
            assert entry.ended is not None
            assert await journal.find("b") == []
            assert metrics.journal_failing.values[""] == 1
            assert metrics.journal_write_errors.values[""] >= 1
        await asyncio.wait_for(until_sound(journal), 30)
        assert metrics.journal_failing.values[""] == 0
        accept(journal, make_entry("c"))
        await journal.flush()
        await journal.close()

        async def read(journal):
            return await journal.find("a"), await journal.find("b"), journal.unfinished()

        (entry,), b, open_ones = await reopened(disk.folder / "journal", read)
        assert [len(output.token_ids) for output in entry.outputs] == [1, 200_000, 1]
        assert b == []
        assert [stream.call for stream in open_ones] == ["c"]

    run(work)
    said = [record.message for record in caplog.records]
    assert sum("cannot be written" in line for line in said) == 1, "once, not at each try"
    assert any("can be written again" in line for line in said)


def test_a_file_system_that_turns_read_only_is_told_and_nothing_is_lost_when_another_takes_its_place(tmp_path):
    """As ext4 does on an I/O error: at once, whoever has files open. Nobody may remount it so meanwhile."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.write_bytes(bytes(16 * 2**20))
    mount = ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)]
    for command in (["mkfs.ext4", "-q", str(image)], mount):
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("a file system can be made and mounted by root alone")

    async def work():
        journal, metrics = Journal(folder / "journal"), Metrics()
        journal.start(metrics)
        accept(journal, make_entry("a"))
        journal.emitted(tokens("a", 1), ended=False)
        await journal.flush()
        device = Path(subprocess.check_output(["findmnt", "-no", "SOURCE", str(folder)], text=True).strip())
        Path(f"/sys/fs/ext4/{device.name}/trigger_fs_error").write_text("as a test")
        with pytest.raises(OSError, match="Read-only"):
            (folder / "probe").touch()
        journal.emitted(tokens("a", 2, ending=FinishReason.LENGTH), ended=True)
        with pytest.raises(JournalUnavailableError, match=r"read-?only|disk I/O error"):
            await journal.flush()
        accept(journal, make_entry("b"))
        with pytest.raises(JournalUnavailableError):
            await journal.flush()
        journal.withdraw(["b"])
        (entry,) = await journal.find("a")
        assert [len(output.token_ids) for output in entry.outputs] == [1, 1]
        assert metrics.journal_failing.values[""] == 1
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        await asyncio.wait_for(until_sound(journal), 30)
        await journal.close()

        async def read(journal):
            return await journal.find("a"), await journal.find("b")

        (entry,), b = await reopened(folder / "journal", read)
        assert [len(output.token_ids) for output in entry.outputs] == [1, 1]
        assert entry.ended is not None
        assert b == []

    try:
        run(work)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


def test_a_server_that_starts_on_a_full_disk_takes_up_what_is_unfinished(disk):
    async def work():
        journal = Journal(disk.folder / "journal", retry_seconds=RETRY)
        accept(journal, make_entry("a"))
        journal.emitted(tokens("a", 1), ended=False)
        await journal.close()
        with disk.full():
            journal = Journal(disk.folder / "journal", retry_seconds=RETRY)
            journal.start(Metrics())
            (entry,) = journal.unfinished()
            assert entry.outputs == [tokens("a", 1)]
            journal.emitted(tokens("a", *range(200_000)), ended=True)
            with pytest.raises(JournalUnavailableError):
                await journal.flush()
        await asyncio.wait_for(until_sound(journal), 30)
        await journal.close()
        assert await reopened(disk.folder / "journal", unfinished) == []

    run(work)


def test_a_new_journal_on_a_full_disk_is_made_when_there_is_space(disk):
    async def work():
        with disk.full():
            journal = Journal(disk.folder / "journal", retry_seconds=RETRY)
            journal.start(Metrics())
            assert journal.write_error is not None
            assert journal.unfinished() == []
            assert await journal.find("a") == []
        await asyncio.wait_for(until_sound(journal), 30)
        accept(journal, make_entry("a"))
        await journal.flush()
        await journal.close()
        assert len(await reopened(disk.folder / "journal", unfinished)) == 1

    run(work)


def test_a_disk_that_stays_full_is_told_at_the_end_and_keeps_a_sound_beginning(tmp_path, caplog):
    async def work():
        journal = Journal(tmp_path / "journal", retry_seconds=RETRY)
        accept(journal, make_entry("a"))
        journal.emitted(tokens("a", 1), ended=False)
        await journal.flush()
        with LimitedFiles(tmp_path).full():
            journal.emitted(tokens("a", *range(200_000)), ended=True)
            await journal.close()
        (entry,) = await reopened(tmp_path / "journal", unfinished)
        assert entry.outputs == [tokens("a", 1)]

    run(work)
    assert "1 requests is computed again by the next server" in caplog.text


def test_a_caller_that_leaves_while_it_waits_takes_nothing_from_the_others(tmp_path):
    async def work():
        journal = Journal(tmp_path / "journal", retry_seconds=RETRY)
        busy = asyncio.Event()
        loop, go_on = asyncio.get_running_loop(), asyncio.Event()

        def block():
            loop.call_soon_threadsafe(busy.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        blocked = journal._submit(block)
        await busy.wait()
        accept(journal, make_entry("a"), make_entry("b"))
        waiting = asyncio.ensure_future(journal.flush())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        go_on.set()
        await blocked
        await journal.flush()
        await journal.close()
        assert len(await reopened(tmp_path / "journal", unfinished)) == 2

    run(work)


# ── files that others touch ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("suffixes", [("",), ("-wal",), ("", "-wal")])
def test_a_file_that_is_removed_while_it_is_open_is_put_back(tmp_path, suffixes):
    async def work():
        journal = Journal(tmp_path / "journal", retry_seconds=RETRY)
        accept(journal, make_entry("a"))
        await journal.flush()
        for suffix in suffixes:
            (tmp_path / f"journal{suffix}").unlink()
        journal.emitted(tokens("a", 1), ended=False)
        accept(journal, make_entry("b"))
        await journal.flush()
        assert (tmp_path / "journal").stat().st_mode & 0o077 == 0
        journal.emitted(tokens("a", 2), ended=False)
        await journal.close()
        a, b = await reopened(tmp_path / "journal", unfinished)
        assert (a.outputs, b.call) == ([tokens("a", 1), tokens("a", 2)], "b")
        assert {path.name for path in tmp_path.iterdir()} <= {"journal", "journal-wal"}

    run(work)


def test_another_file_in_its_place_is_not_touched_and_the_journal_comes_back_when_it_is_gone(tmp_path):
    async def work():
        path = tmp_path / "journal"
        journal = Journal(path, retry_seconds=RETRY)
        journal.start(Metrics())
        accept(journal, make_entry("a"))
        await journal.flush()
        path.unlink()
        path.write_text("mine")
        with pytest.raises(JournalUnavailableError, match="another file"):
            await journal.flush()
        assert path.read_text() == "mine"
        path.unlink()
        await asyncio.wait_for(until_sound(journal), 30)
        await journal.close()
        assert len(await reopened(path, unfinished)) == 1

    run(work)


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def edit(path, statement, *values):
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement, values).fetchall()


def write_three(path):
    """Requests a and b, with three parts of outputs each, and c, which has ended."""

    async def work():
        journal = Journal(path, retry_seconds=RETRY)
        accept(journal, *(make_entry(name, alias=f"alias-{name}", accepted=float(ord(name))) for name in "abc"))
        for token in (1, 2, 3):
            for name in "abc":
                journal.emitted(tokens(name, token), ended=name == "c" and token == 3)
            await journal.flush()
        await journal.close()

    run(work)


BROKEN_BLOBS = {
    "cut": lambda blob: blob[: len(blob) // 2],
    "empty": lambda blob: b"",
    "one bit": lambda blob: blob[:40] + bytes([blob[40] ^ 1]) + blob[41:],
    "another kind": lambda blob: b"\x01",
    "zeros": lambda blob: bytes(len(blob)),
    "a number": lambda blob: 12345,
    "a text": lambda blob: "12345",
}


@pytest.mark.parametrize("how", BROKEN_BLOBS)
def test_a_damaged_record_is_set_aside_and_named_and_the_others_are_taken_up(tmp_path, how, caplog):
    path = tmp_path / "journal"
    write_three(path)
    ((blob,),) = edit(path, "SELECT record FROM requests WHERE id = 'a'")
    broken = BROKEN_BLOBS[how](blob)
    edit(path, "UPDATE requests SET record = ? WHERE id = 'a'", broken)

    async def read(journal):
        metrics = Metrics()
        journal.start(metrics)
        assert [entry.call for entry in journal.unfinished()] == ["b"]
        assert metrics.journal_damaged.values["request"] == 1
        for name in ("a", "alias-a"):
            with pytest.raises(JournalDamagedError, match="request a"):
                await journal.find(name)
        assert len(await journal.find("b")) == 1

    async def work():
        await reopened(path, read)
        assert await reopened(path, unfinished) != []
        with pytest.raises(JournalDamagedError, match="request a"):
            await reopened(path, lambda journal: journal.find("alias-a"))

    run(work)
    assert "request of a is damaged" in caplog.text
    kept = edit(path, "SELECT request, part, content FROM damaged WHERE part IS NULL")
    assert kept == [("a", None, broken)]
    assert len(edit(path, "SELECT * FROM damaged")) == 4, "its outputs are kept too"


@pytest.mark.parametrize(
    ("column", "value"), [("call", 7), ("call", b"x"), ("position", "x"), ("alias", 7.5), ("accepted", b"x")]
)
def test_a_column_of_another_type_loses_its_request_alone(tmp_path, column, value):
    path = tmp_path / "journal"
    write_three(path)
    edit(path, "DROP INDEX IF EXISTS requests_by_call")
    edit(path, f"UPDATE requests SET {column} = CAST(? AS BLOB) WHERE id = 'a'", value)

    async def read(journal):
        metrics = Metrics()
        journal.start(metrics)
        assert [entry.call for entry in journal.unfinished()] == ["b"]
        assert metrics.journal_damaged.values["request"] == 1

    run(lambda: reopened(path, read))


def test_a_schema_with_bytes_that_are_no_text_is_read(tmp_path):
    path = tmp_path / "journal"
    write_three(path)
    edit(path, "CREATE TABLE another (value)")
    path.write_bytes(path.read_bytes().replace(b"another", b"a\xffother"))
    assert len(run(lambda: reopened(path, unfinished))) == 2


@pytest.mark.parametrize("how", BROKEN_BLOBS)
def test_tokens_that_are_damaged_are_computed_again_from_there(tmp_path, how, caplog):
    path = tmp_path / "journal"
    write_three(path)
    ((blob,),) = edit(path, "SELECT outputs FROM outputs WHERE request = 'a' AND part = 3")
    edit(path, "UPDATE outputs SET outputs = ? WHERE request = 'a' AND part = 3", BROKEN_BLOBS[how](blob))

    async def go_on(journal):
        a, b = journal.unfinished()
        assert (len(a.outputs), len(b.outputs)) == (1, 3)
        journal.emitted(tokens("a", 20), ended=False)

    async def work():
        await reopened(path, go_on)
        a, _ = await reopened(path, unfinished)
        assert [output.token_ids for output in a.outputs] == [[1], [20]]

    run(work)
    assert "tokens of request a are damaged" in caplog.text
    assert len(edit(path, "SELECT * FROM damaged")) == 2


def test_a_damaged_result_is_told_to_whoever_asks_for_it(tmp_path):
    path = tmp_path / "journal"
    write_three(path)
    edit(path, "UPDATE outputs SET outputs = x'00' WHERE request = 'c' AND part = 3")

    async def read(journal):
        for name in ("c", "alias-c", "c"):
            with pytest.raises(JournalDamagedError, match="request c"):
                await journal.find(name)
        assert len(await journal.find("a")) == 1

    async def twice():
        await reopened(path, read)
        await reopened(path, read)

    run(twice)


def test_a_journal_of_version_1_is_read_and_brought_up_to_date(tmp_path):
    path = tmp_path / "journal"
    write_three(path)
    for table, column in (("requests", "record"), ("outputs", "outputs")):
        edit(path, f"UPDATE {table} SET {column} = substr({column}, 6)")  # no checksums
    edit(path, "DROP TABLE damaged")
    edit(path, "PRAGMA user_version = 1")

    async def work():
        a, b = await reopened(path, unfinished)
        assert (a.call, b.call, len(a.outputs)) == ("a", "b", 3)

    run(work)
    assert edit(path, "PRAGMA user_version") == [(3,)]


@pytest.mark.parametrize(
    "statement",
    [f"PRAGMA user_version = 4; PRAGMA application_id = {APPLICATION_ID + 4}", "DROP TABLE requests"],
    ids=["newer", "of something else"],
)
def test_a_journal_of_another_version_and_another_database_are_left_alone(tmp_path, statement):
    path = tmp_path / "journal"
    write_three(path)
    for one in statement.split(";"):
        edit(path, one)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"version 4|something else"):
        Journal(path, retry_seconds=RETRY)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["no pages", "zeros", "emptied beside its log"])
def test_a_journal_damaged_beyond_reading_is_kept_beside_a_new_one(tmp_path, damage, caplog):
    path = tmp_path / "journal"
    write_three(path)
    content = path.read_bytes()
    if damage == "no pages":
        content = content[:100] + b"\xff" * (len(content) - 100)
    elif damage == "zeros":
        content = bytes(len(content))
    else:
        content = b""
        (tmp_path / "journal-wal").write_bytes(b"\x37\x7f\x06\x82" + bytes(5000))
    path.write_bytes(content)

    async def go_on(journal):
        assert journal.unfinished() == []
        accept(journal, make_entry("d"))

    async def work():
        await reopened(path, go_on)
        assert len(await reopened(path, unfinished)) == 1

    run(work)
    (kept,) = (path for path in tmp_path.glob("journal.damaged-*") if not path.name.endswith("-wal"))
    assert kept.read_bytes() == content
    assert f"kept as {kept}" in caplog.text
    assert "all requests in it are lost" in caplog.text


BROKEN_FIRST_PAGES = {
    "no first page": lambda page: bytes(len(page)),
    "magic": lambda page: b"?" + page[1:],
    "version": lambda page: page[:63] + b"\x82" + page[64:],
    "name of a table": lambda page: page.replace(b"requests\x02CREATE", b"re\xfduests\x02CREATE"),
    "name of a column": lambda page: page.replace(b"reason TEXT", b"reasot TEXT"),
    "keyword": lambda page: page.replace(b"CREATE TABLE outputs", b"CREATE\xffTABLE outputs"),
}


@pytest.mark.parametrize("how", BROKEN_FIRST_PAGES)
def test_a_journal_with_a_damaged_header_or_schema_loses_nothing(tmp_path, how, caplog):
    path = tmp_path / "journal"
    write_three(path)
    content = path.read_bytes()
    broken = BROKEN_FIRST_PAGES[how](content[:4096])
    assert broken != content[:4096]
    assert len(broken) == 4096
    path.write_bytes(broken + content[4096:])

    async def read(journal):
        assert [(entry.call, len(entry.outputs)) for entry in journal.unfinished()] == [("a", 3), ("b", 3)]
        assert len((await journal.find("c"))[0].outputs) == 3

    run(lambda: reopened(path, read))
    assert "what can be read of it goes to a new file" in caplog.text
    assert edit(path, "PRAGMA integrity_check") == [("ok",)]


def test_a_row_that_an_index_lacks_is_found_again(tmp_path):
    path = tmp_path / "journal"
    write_three(path)
    edit(path, "PRAGMA writable_schema = ON")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'requests_by_end'").fetchone()
    content = bytearray(path.read_bytes())
    page = (root - 1) * 4096
    assert content[page + 3 : page + 5] == b"\0\3"
    content[page + 4] = 1  # of its three entries
    path.write_bytes(content)
    assert [one.call for one in run(lambda: reopened(path, unfinished))] == ["a", "b"]


def test_frames_behind_a_damaged_one_of_the_log_are_read(tmp_path, caplog):
    path, copy = tmp_path / "journal", tmp_path / "copy"

    async def work():
        journal = Journal(path, retry_seconds=RETRY)
        for name in "abcd":
            accept(journal, make_entry(name, accepted=float(ord(name))))
            await journal.flush()
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        await journal.close()

    run(work)
    log = bytearray((tmp_path / "copy-wal").read_bytes())
    log[log.index(b"/model") + 2] ^= 1  # in the record of a
    (tmp_path / "copy-wal").write_bytes(log)

    async def read(journal):
        metrics = Metrics()
        journal.start(metrics)
        found = [entry.call for entry in journal.unfinished()]
        assert found in (["a", "b", "c", "d"], ["b", "c", "d"])  # a later frame has the page of a, too
        assert metrics.journal_damaged.values.get("request", 0) == 4 - len(found)

    run(lambda: reopened(copy, read))
    assert "write-ahead log is malformed" in caplog.text


def test_of_journals_with_random_bytes_changed_each_opens_and_each_lost_request_is_counted(tmp_path, many):
    original = many.read_bytes()
    for seed in range(40):
        dice, content = random.Random(seed), bytearray(original)
        for _ in range(dice.randint(1, 5)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        path = tmp_path / f"journal{seed}"
        path.write_bytes(content)

        async def read(journal):
            metrics = Metrics()
            journal.start(metrics)
            journal.stored_responses()
            return {entry.record.request.request_id for entry in journal.unfinished()}, metrics.journal_damaged.values

        found, damaged = run(lambda path=path, read=read: reopened(path, read))
        lost = {f"r{i:02}" for i in range(60) if i % 3} - found
        assert damaged.get("request", 0) >= len(lost), seed


def test_a_repair_that_was_interrupted_before_its_last_step_is_completed(tmp_path):
    path = tmp_path / "journal"
    write_three(path)
    path.rename(tmp_path / "journal.repaired")

    async def work():
        assert len(await reopened(path, unfinished)) == 2

    run(work)
    assert not (tmp_path / "journal.repaired").exists()


def write_many(path):
    """60 requests over many pages, every third of them ended; the parts of each say 0, 1, 2, ..."""

    async def work():
        journal = Journal(path, retry_seconds=RETRY)
        accept(journal, *(make_entry(f"r{i:02}", accepted=float(i)) for i in range(60)))
        for part in range(4):
            for i in range(60):
                output = tokens(f"r{i:02}", *[part] * 40)
                journal.emitted(output, ended=part == 3 and i % 3 == 0)
            await journal.flush()
        await journal.close()

    run(work)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "journal"
    write_many(path)
    return path


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pages=st.lists(st.tuples(st.integers(1, 10_000), st.sampled_from(["zeros", "ones", "noise"])), max_size=2),
    cut=st.none() | st.floats(0.1, 1),
)
def test_of_a_file_with_damaged_pages_each_request_goes_on_or_is_named(tmp_path_factory, many, pages, cut):
    path = tmp_path_factory.mktemp("damaged") / "journal"
    content = bytearray(many.read_bytes())
    for place, how in pages:
        at = (1 + place % (len(content) // 4096 - 1)) * 4096
        filling = {"zeros": bytes(4096), "ones": b"\xff" * 4096, "noise": os.urandom(4096)}[how]
        content[at : at + 4096] = filling
    if cut is not None:
        del content[max(4096, int(len(content) * cut)) :]
    path.write_bytes(content)

    async def check(journal, parts_are_new):
        open_ones = {entry.call: entry for entry in journal.unfinished()}
        for i in range(60):
            name = f"r{i:02}"
            try:
                found = await journal.find(name)
            except JournalDamagedError:
                assert name not in open_ones
                continue
            if not found:
                assert len(pages) + (cut is not None) > 1, f"{name} is lost without a word"
                continue
            (entry,) = found
            said = [output.token_ids[0] for output in open_ones.get(name, entry).outputs]
            assert said == list(range(len(said))), "there is a gap"
            assert len(said) == 4 or entry.ended is None
            if parts_are_new and name in open_ones:  # go on where it is
                journal.emitted(tokens(name, *[len(said)] * 40), ended=False)
        return open_ones

    async def work():
        first = await reopened(path, lambda journal: check(journal, True))
        again = await reopened(path, lambda journal: check(journal, False))
        assert set(again) == set(first)

    run(work)
