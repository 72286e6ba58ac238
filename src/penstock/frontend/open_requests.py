"""The requests in flight, in an engine or queued, until each has ended for all its readers.

begin_request ──> send_due ─Add─> engine ──outputs──> deliver_outputs ──CompletionDelta──> RequestStream
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.api.request import EXPIRED, Adapter, ErrorReason, FinishReason, Request, RequestOutput, SequenceOutput
from penstock.api.sampling_params import ResolvedParams
from penstock.engine.protocol import Add, Expire, Finish, HandedOver, HandOver
from penstock.errors import (
    ClientGoneError,
    EngineDeadError,
    EngineError,
    PenstockError,
    QueueTimeoutError,
    SlowReaderError,
)
from penstock.fleet.fleet import Fleet
from penstock.fleet.supervisor import Death
from penstock.frontend.history import History, Meter
from penstock.frontend.limits import Admission
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor
from penstock.frontend.recovery.journal import Journal


class RequestStream:
    """The requests of one call, in flight together.

    Iterate for new deltas, as lists of (position of the request in the call, delta), or wait for `results()`. After
    `wake` a list may be empty. Leaving the `with` block aborts unfinished requests. A reader that lets more than
    `max_unread` tokens of a sequence pile up fails with SlowReaderError. A reader blocked in `__anext__` never counts
    as slow: if it has not been scheduled yet, the delay is this process's.
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
            leave: called with the id of an unfinished request that this stream stops reading.
            deltas: deltas to read before new ones.
        """
        self._leave = leave
        self._output_processors = output_processors
        self._positions = {request_id: position for position, request_id in enumerate(output_processors)}
        self._keep_deltas = keep_deltas
        sequences = sum(output_processor.request.params.n for output_processor in output_processors.values())
        self._max_unread = max_unread * sequences
        self._unread = 0
        self._reader_waits = False
        self._woken = False
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
                deltas, self._deltas, self._unread, self._woken = self._deltas, [], 0, False
                return deltas
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            if self._woken:
                self._woken = False
                return []
            self._news.clear()
            self._reader_waits = True
            try:
                await self._news.wait()
            finally:
                self._reader_waits = False

    def wake(self) -> None:
        """Let a waiting reader go on without a delta."""
        self._woken = True
        self._news.set()

    async def results(self) -> list[RequestOutput]:
        """Wait for the complete answers.

        Raises:
            EngineError: the engine was given up or closed before all answers were complete.
            QueueTimeoutError: a request waited in the queue for too long.
        """
        while self.running:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return self.snapshot()

    @property
    def arithmetics(self) -> list[str]:
        """The arithmetic of each request's answer; empty for an answer without a token."""
        return [output_processor.arithmetic for output_processor in self._output_processors.values()]

    def snapshot(self) -> list[RequestOutput]:
        """The answers so far."""
        return [output_processor.result() for output_processor in self._output_processors.values()]

    def abort(self) -> None:
        """Abort unfinished requests, here and in the engine; idempotent."""
        for request_id, output_processor in self._output_processors.items():
            if not output_processor.finished:
                self._leave(request_id, self)

    @property
    def running(self) -> bool:
        """Whether further outputs are possible."""
        return self._unfinished > 0 and self._error is None

    def deliver(self, request_id: str, delta: CompletionDelta | None) -> None:
        """Take the delta of a request, which may be its last."""
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
TOO_LONG_NOW = "the engine was restarted with less memory, and a request of this length no longer fits"
ANOTHER_ARITHMETIC = "the engine that began the answer is gone, and none of those that are left computes as it did"


_Signature = tuple[tuple[int, ...], ResolvedParams, Adapter | None]


@dataclass(slots=True)
class _Live:
    """A request in flight, with its output processor and readers."""

    request: Request
    output_processor: OutputProcessor
    readers: list[RequestStream]
    by_token: bool = False
    """Whether each token becomes a delta of its own, for a reader that has received some of them before."""


class OpenRequests:
    """All requests in flight, by id. Passes each change on to dispatcher, meter, history, journal and readers."""

    def __init__(
        self,
        fleet: Fleet,
        meter: Meter,
        history: History,
        admission: Admission,
        journal: Journal | None,
        reconnect_seconds: float = RECONNECT_SECONDS,
    ) -> None:
        """
        Args:
            reconnect_seconds: seconds that a journaled request may run without a reader before it is aborted.
        """
        self._fleet = fleet
        self._dispatcher = fleet.dispatcher
        self._meter = meter
        self._history = history
        self._admission = admission
        self._journal = journal
        self._reconnect_seconds = reconnect_seconds
        self._live: dict[str, _Live] = {}
        self._quarantine: deque[_Signature] = deque(maxlen=MAX_QUARANTINED)
        self._one_less = asyncio.Event()

    def begin_request(
        self, output_processor: OutputProcessor, readers: Sequence[RequestStream], arithmetic: str | None = None
    ) -> None:
        """Add a request, which may have no reader yet.

        Args:
            arithmetic: the arithmetic of the engine that began its answer; None for a new request.
        """
        request = output_processor.request
        live = _Live(request, output_processor, list(readers), by_token=arithmetic is not None)
        self._live[request.request_id] = live
        self._dispatcher.add_request(request, arithmetic or None)
        self._meter.accepted(request)

    def send_due(self) -> None:
        """Send the requests that are due to engines."""
        now = time.monotonic()
        for replica, request_id in self._dispatcher.due():
            live = self._live[request_id]
            self._history.handed_over(request_id, replica, now)
            source = self._dispatcher.take_source(request_id)
            self._fleet.send_to(replica, Add(live.request, live.output_processor.resume_point(), source))
        self._meter.set_queued(self._dispatcher.num_queued)

    def output_processor(self, request_id: str) -> OutputProcessor | None:
        """A request's output processor; None if it is not in flight."""
        live = self._live.get(request_id)
        return None if live is None else live.output_processor

    def join(self, request_id: str, reader: RequestStream) -> None:
        """Add a reader to a request; ignored if the request is not in flight."""
        if request_id in self._live:
            self._live[request_id].readers.append(reader)

    def is_quarantined(self, request: Request) -> bool:
        """Whether an equal request was convicted of crashing engines."""
        return bool(self._quarantine) and _signature(request) in self._quarantine

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self._live:
            await self.wait_for_departure()

    async def wait_for_departure(self) -> None:
        """Wait until a request has ended or left its replica, or a replica was removed."""
        self._one_less.clear()
        await self._one_less.wait()

    def expire(self, request_id: str) -> None:
        """End a request whose time in the queue is over, unless it has run.

        While it waits for the next engine of its replica, no engine can end it.
        """
        if request_id in self._live and not self._dispatcher.is_in_engine(request_id):
            if not self._dispatcher.has_begun(request_id):
                self._end(self._live[request_id], FinishReason.ERROR, EXPIRED, ErrorReason.EXPIRED)
        else:
            self._fleet.send(Expire(request_id))

    # ── what the engine did ──────────────────────────────────────────────────────────────────────────────────────────

    def deliver_outputs(self, replica: int, outputs: Sequence[SequenceOutput], step: int) -> None:
        """Process the outputs of a step of a replica's engine; `step` is the engine's count of steps."""
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is not None and self._dispatcher.record_output(replica, output, step):
                live.output_processor.arithmetic = self._dispatcher.arithmetic_of(output.request_id) or ""
                for part in single_tokens(output) if live.by_token else (output,):
                    self._feed_or_drop(live, part)
        for request_id in self._dispatcher.take_leaving(replica):
            self._fleet.send_to(replica, HandOver(request_id))
        if self._dispatcher.has_waiting:
            self.send_due()

    def handed_over(self, replica: int, message: HandedOver) -> bool:
        """Queue a request that a prefill engine gave up after its prompt; False if it was no longer the engine's."""
        goes_on = self._dispatcher.handed_over(replica, message.request_id, message.source)
        self._after_move()
        return goes_on

    def engine_died(self, replica: int, death: Death) -> int:
        """Keep a dead engine's requests for the replica's next engine or for other replicas; end a convicted one.

        Returns how many move to other replicas.
        """
        queued = self._dispatcher.num_queued
        convict = self._dispatcher.engine_died(replica, death.request_indices, fault=death.fault, lost=death.lost)
        if death.lost:  # a new engine on another machine may take long: suspects move at once, too
            self._dispatcher.release(replica)
        num_moved = self._dispatcher.num_queued - queued
        if convict is not None:
            logger.error("request %s is ended: it ran alone when the engine %s", convict, death.reason)
            live = self._live[convict]
            self._quarantine.append(_signature(live.request))
            self._end(live, FinishReason.ERROR, f"the request made the engine fail more than once: it {death.reason}")
        self._after_move()
        return num_moved

    def replica_stays_down(self, replica: int) -> int:
        """Move requests that wait for a replica's next engine to other replicas. Returns how many move."""
        queued = self._dispatcher.num_queued
        self._dispatcher.release(replica)
        num_moved = self._dispatcher.num_queued - queued
        self._after_move()
        return num_moved

    def replicas_changed(self) -> None:
        """After a change of replicas: end requests that no replica can continue, and hand over those that can run."""
        for request_id in self._dispatcher.unservable():
            begun = self._dispatcher.has_begun(request_id)
            self._end(self._live[request_id], FinishReason.ERROR, ANOTHER_ARITHMETIC if begun else TOO_LONG_NOW)
        self._after_move()

    def _after_move(self) -> None:
        """Hand over requests that have left a replica, and let a drained replica be looked at again."""
        self.send_due()
        self._one_less.set()

    def _feed_or_drop(self, live: _Live, output: SequenceOutput) -> None:
        """Process an output; an exception ends only this request."""
        try:
            self._feed(live, output)
        except Exception:
            logger.exception("request %s failed", output.request_id)
            self._fleet.send(Finish(output.request_id, None, FinishReason.ABORT))
            if self._journal is not None:  # recorded as ended, or the next server would resume it
                lost = SequenceOutput(output.request_id, output.index, [], finish_reason=FinishReason.ERROR)
                self._journal.emitted(lost, ended=True)
            self._drop(live, EngineError("the server failed on this request; its log has the details"))

    def _feed(self, live: _Live, output: SequenceOutput) -> None:
        request_id, now = output.request_id, time.monotonic()
        delta = live.output_processor.process_output(output, now)
        if delta is not None and delta.engine_goes_on:  # a stop string ended it, which the engine cannot see
            self._fleet.send(Finish(request_id, output.index, FinishReason.STOP))
        if self._journal is not None and delta is not None and not output.is_sign_of_life:
            self._journal.emitted(output, live.output_processor.finished)
        self._meter.output(live.request, output, delta, now)
        if delta is not None and (delta.token_ids or delta.finish_reason is not None):
            self._history.progressed(request_id, now, delta.finish_reason)
        self._admission.output(live.request, len(output.token_ids))
        if live.output_processor.finished:
            del self._live[request_id]
            self._dispatcher.remove_request(request_id, live.output_processor.answers)
            self._meter.finished(live.request, now)
            self._admission.left(live.request)
            self._one_less.set()
        if output.error_reason is ErrorReason.EXPIRED:
            waited = now - live.request.arrival
            for reader in live.readers:
                reader.fail_stream(QueueTimeoutError(f"the request waited {waited:.1f} s in the queue"))
        for reader in list(live.readers):  # a copy: a reader that is too slow leaves
            reader.deliver(request_id, delta)

    # ── their ends ───────────────────────────────────────────────────────────────────────────────────────────────────

    def leave(self, request_id: str, request_stream: RequestStream) -> None:
        """Remove a reader. Without readers the request is aborted; if journaled, after a delay for reconnection."""
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
        """End a request here, and in the engine before its next step."""
        self._fleet.send(Finish(live.request.request_id, None, FinishReason.ABORT))
        self._end(live, FinishReason.ABORT, error)

    def _end(
        self, live: _Live, reason: FinishReason, error: str | None = None, error_reason: ErrorReason | None = None
    ) -> None:
        """End a request here, whatever the engine does."""
        for index in range(live.request.params.n):
            if not live.output_processor.finished:
                ending = SequenceOutput(live.request.request_id, index, [], finish_reason=reason, error=error)
                ending.error_reason = error_reason
                self._feed(live, ending)

    def end_request(self, request_id: str, reason: FinishReason, error: str) -> None:
        """End a request here, whatever the engine does."""
        self._end(self._live[request_id], reason, error)

    def withdraw(self, request_ids: Sequence[str]) -> None:
        """End requests and remove every trace of them; their caller gets an error instead."""
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
        self._dispatcher.remove_request(live.request.request_id)
        self._meter.dropped(live.request)
        self._admission.left(live.request)
        for reader in live.readers:
            reader.fail_stream(error)
        self._one_less.set()


def single_tokens(output: SequenceOutput) -> list[SequenceOutput]:
    """Split an output into outputs of one token each: the first carries the prompt's data, the last the ending."""
    if len(output.token_ids) < 2:
        return [output]
    parts = [
        SequenceOutput(
            output.request_id, output.index, [token], output.logprobs and output.logprobs[position : position + 1]
        )
        for position, token in enumerate(output.token_ids)
    ]
    first, last = parts[0], parts[-1]
    first.first_scheduled, first.num_cached_tokens = output.first_scheduled, output.num_cached_tokens
    first.prompt = output.prompt
    last.finish_reason, last.error, last.error_reason = output.finish_reason, output.error, output.error_reason
    last.score = output.score
    return parts


def _signature(request: Request) -> _Signature:
    """A key that is equal for retries of one request, even if their random seeds differ."""
    return request.prompt_token_ids, replace(request.params, seed=0), request.adapter
