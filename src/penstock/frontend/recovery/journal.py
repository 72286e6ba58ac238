"""Accepted requests and their tokens on disk, so that no accepted request is lost when both processes are killed.

    accept ──> requests (one row each) ──┐                        SQLite, WAL: one thread writes, in batches; the
    tokens ──> outputs (a row a batch) ──┴─> unfinished(), find() event loop waits only for what it asks to wait for
    their images ──> images (by digest)                           (`penstock.frontend.recovery.journal_images`)
    stored responses ──> responses ────────> stored_responses()   (`penstock.frontend.recovery.recent_responses`)

A request is on disk before its caller gets its id; tokens follow within `FLUSH_SECONDS`. Tokens that were sent but not
yet written are not lost: they are recomputed identically from the request. Commits survive the death of every process;
surviving a power failure as well would require waiting for the disk.

While writing fails, new requests are refused, running ones continue, and their outputs are buffered in memory: at most
the answers of the requests that were open. Writing is retried every second.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.api.request import SequenceOutput
from penstock.errors import ConfigError, JournalUnavailableError
from penstock.frontend.metrics import Metrics
from penstock.frontend.recovery.journal_file import JournalFile
from penstock.frontend.recovery.journal_rows import Damage, Entry, JournalBatch, Row
from penstock.frontend.recovery.recent_responses import StoredResponse

T = TypeVar("T")

logger = logging.getLogger("penstock.engine")

FLUSH_SECONDS = 0.1
RETRY_SECONDS = 1.0
KEPT_SECONDS = 3600.0


class Journal:
    """One file, for one server at a time.

    Raises:
        ConfigError: the file cannot be used: another server has it open, it is not a journal, it is of a newer version,
            or the folder is not writable. A full disk does not raise.
    """

    def __init__(self, path: Path, *, retry_seconds: float = RETRY_SECONDS, kept_seconds: float = KEPT_SECONDS) -> None:
        """
        Args:
            retry_seconds: how often writing is retried while it fails.
            kept_seconds: retention time of ended requests' answers.
        """
        self._retry_seconds = retry_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._batch = JournalBatch()
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = Metrics()
        self._reported: dict[str, int] = {}
        self._closed = False
        self.write_error: str | None = None
        """Why the journal cannot be written now, so that requests are refused; None if it can."""
        try:
            self._file = self._thread.submit(JournalFile, path, kept_seconds).result()
        except BaseException:
            self._thread.shutdown()
            raise
        # A first, empty write: a full disk is known before the server says that it is ready.
        self._note(self._thread.submit(self._file.write, JournalBatch()).exception())

    def start(self, metrics: Metrics) -> None:
        """Report to these metrics from now on, and retry failed writes. Must be called in the event loop."""
        self._metrics = metrics
        self._reported.clear()  # what was found as the file was opened
        self._report()
        if self.write_error is not None:
            self._write_soon(self._retry_seconds)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_entries(self, rows: Iterable[Row]) -> None:
        """Add accepted requests. They are on disk once `flush` has returned."""
        self._batch.rows |= {row.request_id: row for row in rows}
        self._write_soon(FLUSH_SECONDS)

    def emitted(self, output: SequenceOutput, ended: bool) -> None:
        """Add a request's tokens or ending; `ended`: all of its answers have ended."""
        # No stream waits for this write: outputs lost with the process are recomputed identically from the request.
        self._batch.outputs.setdefault(output.request_id, []).append(output)
        if ended:
            self._batch.ended[output.request_id] = time.time()
        self._write_soon(FLUSH_SECONDS)

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """Remove requests that were refused after all, without a trace."""
        self._batch.merge(JournalBatch(withdrawn=set(request_ids)))
        self._write_soon(FLUSH_SECONDS)

    def set_aside_outputs(self, request_id: str, reason: str) -> None:
        """Move a request's unusable outputs to the damaged rows; later outputs are its first."""
        logger.error("recorded tokens of request %s are damaged (%s); they are computed again", request_id, reason)
        self._metrics.journal_damaged.add(1, "tokens")
        self._batch.damage.append(Damage(request_id, 0, reason))
        self._write_soon(FLUSH_SECONDS)

    def store_response(self, number: int, response: StoredResponse) -> None:
        """Add a stored response. Numbers increase."""
        self._batch.responses[number] = response
        self._write_soon(FLUSH_SECONDS)

    def forget_response(self, number: int) -> None:
        """Remove a stored response."""
        self._batch.responses[number] = None
        self._write_soon(FLUSH_SECONDS)

    async def flush(self) -> None:
        """Write everything added so far to disk.

        Raises:
            JournalUnavailableError: it cannot be written now; it will be written later, or must be withdrawn.
        """
        if self.write_error is None:  # otherwise the timer retries, and callers fail at once
            await asyncio.wait({self._write()})  # the caller may be cancelled, but not the write
        self.check()

    def check(self) -> None:
        """
        Raises:
            JournalUnavailableError: it cannot be written now.
        """
        if self.write_error is not None:
            raise JournalUnavailableError(
                f"the journal cannot be written, so no request is accepted: {self.write_error}"
            )

    def _write_soon(self, seconds: float) -> None:
        if self._timer is None and not self._closed:
            wait = seconds if self.write_error is None else self._retry_seconds
            self._timer = asyncio.get_running_loop().call_later(wait, self._write)

    def _write(self) -> "asyncio.Future[None]":
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Taken here, in the event loop: while the thread writes this batch, rows go into the next one.
        written = self._submit(self._file.write, self._take())
        written.add_done_callback(self._written)
        return written

    def _written(self, done: "asyncio.Future[None]") -> None:
        self._note(None if done.cancelled() else done.exception())
        if self.write_error is not None:
            self._write_soon(self._retry_seconds)

    def _take(self) -> JournalBatch:
        batch, self._batch = self._batch, JournalBatch()
        return batch

    def _note(self, error: BaseException | None) -> None:
        """Record the success or failure of a write."""
        if error is None and self.write_error is not None:
            logger.info("the journal can be written again; requests are accepted")
        elif error is not None and self.write_error is None:
            logger.critical("the journal cannot be written, and no request is accepted until it can be: %s", error)
        self.write_error = None if error is None else str(error) or type(error).__name__
        if error is not None:
            self._metrics.journal_write_errors.add(1)
        self._report()

    def _report(self) -> None:
        self._metrics.journal_failing.set(self.write_error is not None)
        for what, count in self._file.num_damaged.items():
            self._metrics.journal_damaged.add(count - self._reported.get(what, 0), what)
            self._reported[what] = count

    def _submit(self, work: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, name: str) -> list[Entry]:
        """The current requests of a call, by its name, its alias or the id of one of them; [] if it is unknown.

        Raises:
            JournalDamagedError: part of the call is damaged and lost.
            JournalUnavailableError: the journal cannot be read now.
        """
        if self.write_error is None:
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
        """The unfinished requests, in order of arrival. Called at startup.

        Raises:
            ConfigError: the journal cannot be read.
        """
        return self._read_at_start(self._file.unfinished)

    def stored_responses(self) -> list[tuple[int, StoredResponse]]:
        """The stored responses with their numbers, in order. Called at startup.

        Raises:
            ConfigError: the journal cannot be read.
        """
        return self._read_at_start(self._file.stored_responses)

    def _read_at_start(self, read: Callable[[], T]) -> T:
        try:
            rows = self._thread.submit(read).result()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"the journal cannot be read: {error}") from None
        self._report()
        self._write_soon(FLUSH_SECONDS)  # moves damaged rows
        return rows

    async def close(self) -> None:
        """Write the rest, and close the file."""
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
