"""Accepted requests and their tokens on disk, so that both processes may be killed and nothing accepted is lost.

    accept ──> requests (one row each) ──┐                        SQLite, WAL: one thread writes, in batches; the
    tokens ──> outputs (a row a batch) ──┴─> unfinished(), find() event loop waits only for what it asks to wait for

A request is on disk before its caller gets its id; tokens follow within `FLUSH_SECONDS`. Those that were sent but not
yet written are no loss: with the same request they are computed again. Commits survive the death of every process; to
survive a power cut as well they would have to wait for the disk.

While writing fails, new requests are refused, those that run go on, and their outputs are kept in memory until they can
be written: at most the answers of the requests that were open. Writing is tried again every second.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.errors import ConfigError, JournalUnavailableError
from penstock.frontend.recovery.journal_file import JournalFile
from penstock.frontend.recovery.journal_rows import Batch, Damage, Entry, Row
from penstock.metrics import Metrics
from penstock.request import SequenceOutput

T = TypeVar("T")

logger = logging.getLogger("penstock.engine")

FLUSH_SECONDS = 0.1
RETRY_SECONDS = 1.0
KEPT_SECONDS = 3600.0


class Journal:
    """One file, for one server at a time.

    Raises:
        ConfigError: the file cannot be used: another server has it, it is no journal, it is of a newer version, or the
            folder is not writable. A full disk is no such case.
    """

    def __init__(self, path: Path, *, retry_seconds: float = RETRY_SECONDS, kept_seconds: float = KEPT_SECONDS) -> None:
        """
        Args:
            retry_seconds: how often a journal that cannot be written is tried.
            kept_seconds: how long the answers of ended requests can be asked for.
        """
        self._retry_seconds = retry_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._batch = Batch()
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = Metrics()
        self._reported: dict[str, int] = {}
        self._closed = False
        self.trouble: str | None = None
        """Why the journal cannot be written now, so that no request can be accepted; None if it can."""
        try:
            self._file = self._thread.submit(JournalFile, path, kept_seconds).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._note(self._thread.submit(self._file.write, Batch()).exception())

    def start(self, metrics: Metrics) -> None:
        """Report to these metrics from now on, and try again by itself. To be called in the event loop."""
        self._metrics = metrics
        self._report()
        if self.trouble is not None:
            self._write_soon(self._retry_seconds)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_entries(self, rows: Iterable[Row]) -> None:
        """Requests were accepted. They are on disk once `flush` has been waited for."""
        self._batch.rows |= {row[0]: row for row in rows}
        self._write_soon(FLUSH_SECONDS)

    def emitted(self, output: SequenceOutput, ended: bool) -> None:
        """A request got tokens, or an ending; `ended`: it has ended altogether."""
        self._batch.outputs.setdefault(output.request_id, []).append(output)
        if ended:
            self._batch.ended[output.request_id] = time.time()
        self._write_soon(FLUSH_SECONDS)

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """Requests were refused after all: they are to leave no trace."""
        self._batch.merge(Batch(withdrawn=set(request_ids)))
        self._write_soon(FLUSH_SECONDS)

    def set_aside_outputs(self, request_id: str, reason: str) -> None:
        """A request's outputs are of no use. They are kept apart, and those that come from now on are its first."""
        logger.error("recorded tokens of request %s are damaged (%s); they are computed again", request_id, reason)
        self._metrics.journal_damaged.add(1, "tokens")
        self._batch.damage.append(Damage(request_id, 0, reason))
        self._write_soon(FLUSH_SECONDS)

    async def flush(self) -> None:
        """Have everything so far on disk.

        Raises:
            JournalUnavailableError: it cannot be written now; it will be later, or is to be withdrawn.
        """
        if self.trouble is None:
            await asyncio.wait({self._write()})  # the caller may be cancelled, but not the write
        self.check()

    def check(self) -> None:
        """
        Raises:
            JournalUnavailableError: it cannot be written now.
        """
        if self.trouble is not None:
            raise JournalUnavailableError(f"the journal cannot be written, so nothing can be promised: {self.trouble}")

    def _write_soon(self, seconds: float) -> None:
        if self._timer is None and not self._closed:
            wait = seconds if self.trouble is None else self._retry_seconds
            self._timer = asyncio.get_running_loop().call_later(wait, self._write)

    def _write(self) -> "asyncio.Future[None]":
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        written = self._submit(self._file.write, self._take())
        written.add_done_callback(self._written)
        return written

    def _written(self, done: "asyncio.Future[None]") -> None:
        self._note(None if done.cancelled() else done.exception())
        if self.trouble is not None:
            self._write_soon(self._retry_seconds)

    def _take(self) -> Batch:
        batch, self._batch = self._batch, Batch()
        return batch

    def _note(self, error: BaseException | None) -> None:
        """A write has succeeded, or failed."""
        if error is None and self.trouble is not None:
            logger.warning("the journal can be written again; requests are accepted")
        elif error is not None and self.trouble is None:
            logger.critical("the journal cannot be written, and no request is accepted until it can be: %s", error)
        self.trouble = None if error is None else str(error) or type(error).__name__
        if error is not None:
            self._metrics.journal_write_errors.add(1)
        self._report()

    def _report(self) -> None:
        self._metrics.journal_failing.set(self.trouble is not None)
        for what, count in self._file.num_damaged.items():
            self._metrics.journal_damaged.add(count - self._reported.get(what, 0), what)
            self._reported[what] = count

    def _submit(self, work: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, name: str) -> list[Entry]:
        """The requests of a call as of now, by its name, its alias or the id of one of them; [] if it is unknown.

        Raises:
            JournalDamagedError: a part of the call was damaged, and is lost.
            JournalUnavailableError: the journal cannot be read now.
        """
        if self.trouble is None:
            await asyncio.wait({self._write()})
        else:
            self._submit(self._file.keep, self._take())
        try:
            return await asyncio.shield(self._submit(self._file.find, name))
        except (sqlite3.Error, OSError) as error:
            raise JournalUnavailableError(f"the journal cannot be read: {error}") from None
        finally:
            self._report()

    def unfinished(self) -> list[Entry]:
        """The requests that have not ended, in the order in which they came. To be called at the start.

        Raises:
            ConfigError: the journal cannot be read.
        """
        try:
            entries = self._thread.submit(self._file.unfinished).result()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"the journal cannot be read: {error}") from None
        self._report()
        self._write_soon(FLUSH_SECONDS)  # what was damaged is moved
        return entries

    async def close(self) -> None:
        """Write the rest, and let the file go."""
        self._closed = True
        batch = self._take()
        if self._timer is not None:
            self._timer.cancel()

        def finish() -> None:
            try:
                self._file.write(batch)
            except (sqlite3.Error, OSError) as error:
                logger.critical(
                    "the journal could not be written: %s; what it lacks of %d requests is computed again by the next "
                    "server that has it",
                    error,
                    self._file.num_unwritten,
                )
            finally:
                self._file.close()

        self._thread.submit(finish)
        await asyncio.to_thread(self._thread.shutdown)
