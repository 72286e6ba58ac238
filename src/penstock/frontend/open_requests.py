"""The requests in flight: with the engine, or waiting for one, until each has ended for all who read it.

begin_request ──> hand_over ─Add─> engine ──outputs──> deliver_outputs ──CompletionDelta──> RequestStream
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.engine.protocol import Add, Finish
from penstock.errors import (
    ClientGoneError,
    EngineDeadError,
    EngineError,
    PenstockError,
    QueueTimeoutError,
    SlowReaderError,
)
from penstock.frontend.history import History, Meter
from penstock.frontend.limits import Admission
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor
from penstock.frontend.recovery.crash_blame import CrashBlame
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.supervisor import Death, Supervisor
from penstock.request import ErrorReason, FinishReason, Request, RequestOutput, SequenceOutput
from penstock.sampling_params import ResolvedParams


class RequestStream:
    """The requests of one call, in flight together.

    Iterate for what is new, as lists of (position of the request in the call, delta), or wait for `results()`.
    Leaving the `with` block ends, with `abort`, whatever is unfinished. A reader that is busy with something else while
    more than `max_unread` tokens come for each sequence loses the rest. A reader blocked in `__anext__` never counts as
    slow; not having been scheduled yet is this process's delay.
    """

    def __init__(
        self,
        leave: Callable[[str, "RequestStream"], None],
        output_processors: dict[str, OutputProcessor],
        keep_deltas: bool,
        max_unread: int,
        deltas: Sequence[tuple[int, CompletionDelta]] = (),
    ) -> None:
        """
        Args:
            leave: called with the id of an unfinished request that this stream no longer reads.
            deltas: what is to be read before anything new.
        """
        self._leave = leave
        self._output_processors = output_processors
        self._positions = {request_id: position for position, request_id in enumerate(output_processors)}
        self._keep_deltas = keep_deltas
        sequences = sum(output_processor.request.params.n for output_processor in output_processors.values())
        self._max_unread = max_unread * sequences
        self._unread = 0
        self._reader_waits = False
        self._deltas = list(deltas)
        self._unfinished = sum(not output_processor.finished for output_processor in output_processors.values())
        self._error: PenstockError | None = None
        self._news = asyncio.Event()

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[tuple[int, CompletionDelta]]:
        while True:
            if self._deltas:
                deltas, self._deltas, self._unread = self._deltas, [], 0
                return deltas
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._news.clear()
            self._reader_waits = True
            try:
                await self._news.wait()
            finally:
                self._reader_waits = False

    async def results(self) -> list[RequestOutput]:
        """The complete answers, once all are.

        Raises:
            EngineError: the engine was given up, or closed, before that.
            QueueTimeoutError: a request waited in the queue for too long.
        """
        while self.running:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return self.snapshot()

    def snapshot(self) -> list[RequestOutput]:
        """The answers as far as they got."""
        return [output_processor.result() for output_processor in self._output_processors.values()]

    def abort(self) -> None:
        """End whatever is unfinished, here and in the engine; idempotent."""
        for request_id, output_processor in self._output_processors.items():
            if not output_processor.finished:
                self._leave(request_id, self)

    @property
    def running(self) -> bool:
        """Whether anything may still come."""
        return self._unfinished > 0 and self._error is None

    def deliver(self, request_id: str, delta: CompletionDelta | None) -> None:
        """Called by the engine: something came for a request, perhaps its end."""
        if self._output_processors[request_id].finished:
            self._unfinished -= 1
        if delta is not None and self._keep_deltas and self._error is None:
            self._keep(self._positions[request_id], delta)
        if self._keep_deltas or not self._unfinished:
            self._news.set()

    def _keep(self, position: int, delta: CompletionDelta) -> None:
        self._unread += 0 if self._reader_waits else len(delta.token_ids)
        if self._unread <= self._max_unread:
            self._deltas.append((position, delta))
            return
        self._deltas = []
        self.fail_stream(SlowReaderError(f"the stream's reader fell more than {self._max_unread} tokens behind"))

    def fail_stream(self, error: PenstockError) -> None:
        """End the stream with an error, and abort its unfinished requests."""
        self._error = self._error or error
        self._news.set()
        self.abort()


logger = logging.getLogger("penstock.engine")

MAX_QUARANTINED = 64
RECONNECT_SECONDS = 30.0


@dataclass(slots=True)
class _Live:
    """A request that the engine works on."""

    request: Request
    output_processor: OutputProcessor
    readers: list[RequestStream]


class OpenRequests:
    """Requests by their ids, and what must hear of each change: ledger, meter, history, journal, admission, readers."""

    def __init__(
        self,
        supervisor: Supervisor,
        meter: Meter,
        history: History,
        admission: Admission,
        journal: Journal | None,
        reconnect_seconds: float = RECONNECT_SECONDS,
    ) -> None:
        """
        Args:
            reconnect_seconds: how long a journaled request goes on without a reader before it is aborted.
        """
        self._supervisor = supervisor
        self._meter = meter
        self._history = history
        self._admission = admission
        self._journal = journal
        self._reconnect_seconds = reconnect_seconds
        self._blame = CrashBlame()
        self._live: dict[str, _Live] = {}
        self._quarantine: deque[tuple[tuple[int, ...], ResolvedParams]] = deque(maxlen=MAX_QUARANTINED)
        self._one_less = asyncio.Event()

    def begin_request(self, output_processor: OutputProcessor, readers: Sequence[RequestStream]) -> None:
        """Add a request, perhaps without a reader yet."""
        request = output_processor.request
        self._live[request.request_id] = _Live(request, output_processor, list(readers))
        self._blame.add_request(request.request_id)
        self._meter.accepted(request)

    def hand_over(self) -> None:
        """Give the engine, if there is one, all that is due."""
        if self._supervisor.down is None:
            for request_id in self._blame.due():
                live = self._live[request_id]
                self._supervisor.send(Add(live.request, live.output_processor.resume_point()))

    def output_processor(self, request_id: str) -> OutputProcessor | None:
        """What a request has given so far; None if it is not in flight."""
        live = self._live.get(request_id)
        return None if live is None else live.output_processor

    def join(self, request_id: str, reader: RequestStream) -> None:
        """Let one more read a request, if it is in flight."""
        if request_id in self._live:
            self._live[request_id].readers.append(reader)

    @property
    def num_in_engine(self) -> int:
        return self._blame.num_in_engine

    def is_quarantined(self, request: Request) -> bool:
        """Whether an equal request was convicted of an engine's death."""
        return bool(self._quarantine) and _signature(request) in self._quarantine

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self._live:
            self._one_less.clear()
            await self._one_less.wait()

    # ── what the engine did ──────────────────────────────────────────────────────────────────────────────────────────

    def deliver_outputs(self, outputs: Sequence[SequenceOutput], step: int) -> None:
        """Take in the outputs of the engine's step of this number."""
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is not None:
                if output.token_ids or output.is_sign_of_life:
                    self._blame.progressed(output.request_id, step)
                self._feed_or_drop(live, output)
        if self._blame.num_waiting:
            self.hand_over()

    def engine_died(self, death: Death) -> None:
        """All wait for the next engine, but for the one that is convicted of this death."""
        convict = self._blame.died(death.request_indices, fault=death.fault)
        if convict is not None:
            logger.error("request %s is ended: with it alone to blame, the engine %s", convict, death.reason)
            live = self._live[convict]
            self._quarantine.append(_signature(live.request))
            self._end(live, FinishReason.ERROR, f"the request made the engine fail more than once: it {death.reason}")

    def end_unless(self, fits: Callable[[Request], bool], error: str) -> None:
        """End, with an error, those that do not fit the engine."""
        for live in list(self._live.values()):
            if not fits(live.request):
                self._end(live, FinishReason.ERROR, error)

    def _feed_or_drop(self, live: _Live, output: SequenceOutput) -> None:
        """One failure, one request: a defect in what turns its tokens into text ends no other."""
        try:
            self._feed(live, output)
        except Exception:
            logger.exception("request %s failed", output.request_id)
            self._supervisor.send(Finish(output.request_id, None, FinishReason.ABORT))
            if self._journal is not None:
                lost = SequenceOutput(output.request_id, output.index, [], finish_reason=FinishReason.ERROR)
                self._journal.emitted(lost, ended=True)
            self._drop(live, EngineError("the server failed on this request; its log has the details"))

    def _feed(self, live: _Live, output: SequenceOutput) -> None:
        request_id, now = output.request_id, time.monotonic()
        delta = live.output_processor.process_output(output, now)
        if delta is not None and delta.engine_goes_on:
            self._supervisor.send(Finish(request_id, output.index, FinishReason.STOP))
        if self._journal is not None and delta is not None and not output.is_sign_of_life:
            self._journal.emitted(output, live.output_processor.finished)
        self._meter.output(live.request, output, delta, now)
        if delta is not None and (delta.token_ids or delta.finish_reason is not None):
            self._history.progressed(request_id, now, delta.finish_reason)
        self._admission.output(live.request, len(output.token_ids))
        if live.output_processor.finished:
            del self._live[request_id]
            self._blame.remove_request(request_id)
            self._meter.finished(live.request, now)
            self._admission.left(live.request)
            self._one_less.set()
        if output.error_reason is ErrorReason.EXPIRED:
            waited = now - live.request.arrival
            for reader in live.readers:
                reader.fail_stream(QueueTimeoutError(f"the request waited {waited:.1f} s in the queue"))
        for reader in list(live.readers):
            reader.deliver(request_id, delta)

    # ── their ends ───────────────────────────────────────────────────────────────────────────────────────────────────

    def leave(self, request_id: str, request_stream: RequestStream) -> None:
        """A reader has gone. With the last one goes the request; if it is journaled, the reader may come again."""
        live = self._live.get(request_id)
        if live is None or request_stream not in live.readers:
            return
        if self._journal is None:
            self._abort(live)
            return
        live.readers.remove(request_stream)
        request_stream.fail_stream(ClientGoneError("the reader has left"))
        asyncio.get_running_loop().call_later(self._reconnect_seconds, self._abort_unread, live)

    def _abort_unread(self, live: _Live) -> None:
        if not live.readers and live.request.request_id in self._live:
            self._abort(live)

    def _abort(self, live: _Live, error: str | None = None) -> None:
        """End a request here and, before its next step, in the engine."""
        self._supervisor.send(Finish(live.request.request_id, None, FinishReason.ABORT))
        self._end(live, FinishReason.ABORT, error)

    def _end(self, live: _Live, reason: FinishReason, error: str | None = None) -> None:
        """End a request here, whatever the engine does."""
        for index in range(live.request.params.n):
            if not live.output_processor.finished:
                ending = SequenceOutput(live.request.request_id, index, [], finish_reason=reason, error=error)
                self._feed(live, ending)

    def end_request(self, request_id: str, reason: FinishReason, error: str) -> None:
        """End a request here, whatever the engine does."""
        self._end(self._live[request_id], reason, error)

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """End requests whose caller is told that they were not accepted."""
        for request_id in request_ids:
            if request_id in self._live:
                self._abort(self._live[request_id])

    def abort_all(self, reason: str) -> None:
        """End every request with `abort`."""
        for live in list(self._live.values()):
            self._abort(live, reason)

    def lose(self, error: EngineDeadError) -> None:
        """Fail all requests at once."""
        lost, self._live = self._live, {}
        for live in lost.values():
            self._drop(live, error)

    def _drop(self, live: _Live, error: EngineError) -> None:
        """Forget a request whose answer cannot be completed."""
        self._live.pop(live.request.request_id, None)
        self._blame.remove_request(live.request.request_id)
        self._meter.dropped(live.request)
        self._admission.left(live.request)
        for reader in live.readers:
            reader.fail_stream(error)
        self._one_less.set()


def _signature(request: Request) -> tuple[tuple[int, ...], ResolvedParams]:
    """Prompt and parameters without the seed: equal for requests that are retries of one another."""
    return request.prompt_token_ids, replace(request.params, seed=0)
