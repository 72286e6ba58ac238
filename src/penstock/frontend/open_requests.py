"""The requests in flight, in an engine or queued, until each has ended for all its readers.

begin_request ──> send_due ─Add─> engine ──outputs──> deliver_outputs ──CompletionDelta──> RequestStream

`OpenRequests` has the only table of them. Each is one `OpenRequest`, which its collaborators are handed: dispatch,
router and crash blame (`FleetRequest`), limits (`Admitted`), metrics (`Progress`) and history (`RequestRecord`).
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace

from penstock.api.request import EXPIRED, Adapter, ErrorReason, FinishReason, Request, SequenceOutput
from penstock.api.sampling_params import ResolvedParams, SamplingParams
from penstock.dataclass import dataclass
from penstock.engine.protocol import Add, Expire, Finish, HandedOver, HandOver
from penstock.errors import ClientGoneError, EngineDeadError, EngineError, PenstockError, QueueTimeoutError
from penstock.fleet.fleet import Fleet
from penstock.fleet.placement import ReplicaStatus
from penstock.fleet.replica import Death
from penstock.fleet.request import FleetRequest
from penstock.frontend.history import RequestRecord
from penstock.frontend.limits import Admission, Admitted, Caller
from penstock.frontend.meter import Meter, Progress
from penstock.frontend.output_processor import OutputProcessor
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.request_stream import RequestStream

logger = logging.getLogger("penstock.engine")

MAX_QUARANTINED = 64
RECONNECT_SECONDS = 30.0
TOO_LONG_NOW = "the engine was restarted with less memory, and a request of this length no longer fits"
ANOTHER_ARITHMETIC = "the engine that began the answer is gone, and none of those that are left computes as it did"


_Signature = tuple[tuple[int, ...], ResolvedParams, Adapter | None, tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A validated request, with the data that its output processor needs."""

    request: Request
    params: SamplingParams
    prompt: str | None
    caller: Caller


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRequest(FleetRequest):
    """A request in flight: everything that the server process knows of it."""

    output_processor: OutputProcessor
    readers: list[tuple[RequestStream, int]] = field(default_factory=list)
    """Streams that it is read by, with its position in each one's call."""
    by_token: bool = False
    """Whether each token becomes a delta of its own, for a reader that has received some of them before."""
    admitted: Admitted | None = None
    """Its part of the limits; None: it counts for nothing in them."""
    record: RequestRecord | None = None
    """Its record in the history; None if it was restored from a journal."""
    progress: Progress = field(default_factory=Progress)


@dataclass(slots=True, eq=False)
class Series:
    """A call whose requests follow one another, such as those about the windows of a long sound."""

    may_go_on: bool = False
    """Whether its first request was accepted, and it was not aborted since."""


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Adapter names of open requests; one adapter may have both running and waiting requests."""

    running: list[str]
    waiting: list[str]


class OpenRequests:
    """All requests in flight, by id. Passes each change on to dispatcher, meter, history, journal and readers."""

    def __init__(
        self,
        fleet: Fleet,
        meter: Meter,
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
        self._admission = admission
        self._journal = journal
        self._reconnect_seconds = reconnect_seconds
        self._open: dict[str, OpenRequest] = {}
        self._quarantine: deque[_Signature] = deque(maxlen=MAX_QUARANTINED)
        self._one_less = asyncio.Event()
        self._series: set[Series] = set()

    @contextlib.contextmanager
    def series(self) -> Iterator[Series]:
        """A call whose requests follow one another; until the end of the context it counts as in flight."""
        series = Series()
        self._series.add(series)
        try:
            yield series
        finally:
            self._series.discard(series)
            self._one_less.set()

    def begin_request(self, open_request: OpenRequest) -> None:
        """Add a request, which may have no reader yet."""
        assert open_request.request_id not in self._open, f"request id {open_request.request_id!r} is here already"
        self._open[open_request.request_id] = open_request
        self._dispatcher.add_request(open_request)
        self._meter.accepted(open_request.request)

    def send_due(self) -> None:
        """Send the requests that are due to engines."""
        now = time.monotonic()
        for replica, due in self._dispatcher.due():
            open_request = self._open[due.request_id]
            if open_request.record is not None:
                open_request.record.handed_over(replica, now)
            self._fleet.send_to(
                replica,
                Add(open_request.request, open_request.output_processor.resume_point(), open_request.take_source()),
            )

    def find(self, request_id: str) -> OpenRequest | None:
        """The request of this id; None if it is not in flight."""
        return self._open.get(request_id)

    def adapter_use(self) -> AdapterUse:
        """The adapters of the requests; a request runs once it has been in a step."""
        running, waiting = set[str](), set[str]()
        for open_request in self._open.values():
            if open_request.request.adapter is not None:
                (waiting if open_request.progress.first_scheduled is None else running).add(
                    open_request.request.adapter.name
                )
        return AdapterUse(sorted(running), sorted(waiting))

    def uses_adapter(self, path: str) -> bool:
        """Whether a request uses an adapter of these files."""
        adapters = (open_request.request.adapter for open_request in self._open.values())
        return any(adapter is not None and adapter.path == path for adapter in adapters)

    def is_quarantined(self, request: Request) -> bool:
        """Whether an equal request was convicted of crashing engines."""
        return bool(self._quarantine) and _signature(request) in self._quarantine

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        while self._open or self._series:
            await self.wait_for_departure()

    async def wait_for_departure(self) -> None:
        """Wait until a request has ended or left its replica, or a replica was removed."""
        self._one_less.clear()
        await self._one_less.wait()

    def expire(self, request_id: str) -> None:
        """End a request whose time in the queue is over, unless it has run.

        While it waits for the next engine of its replica, no engine can end it.
        """
        open_request = self._open.get(request_id)
        if open_request is None:
            return
        if open_request.is_in_engine:
            self._fleet.send(open_request, Expire(request_id))
        elif not open_request.has_begun:
            self.end_request(open_request, FinishReason.ERROR, EXPIRED, ErrorReason.EXPIRED)

    # ── events of engines ────────────────────────────────────────────────────────────────────────────────────────────

    def deliver_outputs(self, replica: ReplicaStatus, outputs: Sequence[SequenceOutput], step: int) -> None:
        """Process the outputs of a step of a replica's engine; `step` is the engine's count of steps."""
        now = time.monotonic()
        for output in outputs:
            open_request = self._open.get(output.request_id)
            if open_request is not None and self._dispatcher.record_output(replica, open_request, output, step):
                # The ids of its events name it: any server with the same arithmetic can continue the stream
                # (`StreamCursor`).
                open_request.output_processor.arithmetic = open_request.arithmetic or ""
                try:
                    for part in single_tokens(output) if open_request.by_token else (output,):
                        self._feed(open_request, part, now)
                except Exception:  # ends only this request
                    logger.exception("request %s failed", open_request.request_id)
                    self._fail_request(open_request, output.index)
        if replica.begun:
            for leaving in self._dispatcher.take_leaving(replica):
                self._fleet.send_to(replica.number, HandOver(leaving.request_id))
        # An output may have cleared a suspect or made room, so that others can go.
        if self._dispatcher.has_waiting:
            self.send_due()

    def handed_over(self, replica: int, message: HandedOver) -> bool:
        """Queue a request that a prefill engine gave up after its prompt; False if it was no longer the engine's."""
        open_request = self._open.get(message.request_id)
        goes_on = open_request is not None and self._dispatcher.handed_over(replica, open_request, message.source)
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
            open_request = self._open[convict.request_id]
            logger.error("request %s is ended: it ran alone when the engine %s", open_request.request_id, death.reason)
            # A client that retries would otherwise kill the next engines with the same request.
            self._quarantine.append(_signature(open_request.request))
            self.end_request(
                open_request, FinishReason.ERROR, f"the request made the engine fail more than once: it {death.reason}"
            )
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
        for unservable in self._dispatcher.unservable():
            open_request = self._open[unservable.request_id]
            self.end_request(
                open_request, FinishReason.ERROR, ANOTHER_ARITHMETIC if open_request.has_begun else TOO_LONG_NOW
            )
        self._after_move()

    def _after_move(self) -> None:
        """Hand over requests that have left a replica, and let a drained replica be looked at again."""
        self.send_due()
        self._one_less.set()

    def _fail_request(self, open_request: OpenRequest, index: int) -> None:
        """End a request on an exception of this process at an output of the sequence `index`."""
        self._fleet.send(open_request, Finish(open_request.request_id, None, FinishReason.ABORT))
        if self._journal is not None:  # recorded as ended, or the next server would resume it
            lost = SequenceOutput(open_request.request_id, index, [], finish_reason=FinishReason.ERROR)
            self._journal.emitted(lost, ended=True)
        self._remove(open_request)
        self._fail_readers(open_request, EngineError("the server failed on this request; its log has the details"))

    def _feed(self, open_request: OpenRequest, output: SequenceOutput, now: float) -> None:
        """Process an output: its text, its records, its readers."""
        output_processor = open_request.output_processor
        delta = output_processor.process_output(output, now)
        finished = output_processor.finished
        if delta is not None:
            if delta.engine_goes_on:  # a stop string ended it, which the engine cannot see
                self._fleet.send(open_request, Finish(open_request.request_id, output.index, FinishReason.STOP))
            if self._journal is not None and not output.is_sign_of_life:
                self._journal.emitted(output, finished)
            if open_request.record is not None and (delta.token_ids or delta.finish_reason is not None):
                open_request.record.progressed(now, len(delta.token_ids), delta.finish_reason)
        self._meter.output(open_request.request, open_request.progress, output, delta, now)
        if open_request.admitted is not None:
            self._admission.output(open_request.admitted, len(output.token_ids))
        if finished:
            # Before readers learn of the end: the place in the queue is free by the time the client calls again.
            self._remove(open_request, output_processor.answers)
            self._meter.finished(open_request.request, open_request.progress, now)
        if output.error_reason is ErrorReason.EXPIRED:
            waited = now - open_request.request.arrival
            self._fail_readers(open_request, QueueTimeoutError(f"the request waited {waited:.1f} s in the queue"))
        for reader, position in open_request.readers.copy():  # a reader that is too slow leaves
            reader.deliver(position, delta, is_last=finished)

    def _remove(self, open_request: OpenRequest, answers: Sequence[Sequence[int]] = ()) -> None:
        """Take a request out of the table, once; `answers` are its tokens if its engine ended it."""
        if self._open.pop(open_request.request_id, None) is not None:
            self._forget(open_request, answers)

    def _forget(self, open_request: OpenRequest, answers: Sequence[Sequence[int]] = ()) -> None:
        self._dispatcher.remove_request(open_request, answers)
        if open_request.admitted is not None:
            self._admission.left(open_request.admitted)
        self._one_less.set()

    # ── their ends ───────────────────────────────────────────────────────────────────────────────────────────────────

    def leave(self, request_id: str, request_stream: RequestStream) -> None:
        """Remove a reader. Without readers the request is aborted; if journaled, after a delay for reconnection."""
        open_request = self._open.get(request_id)
        if open_request is None or all(reader is not request_stream for reader, _ in open_request.readers):
            return
        if self._journal is None:
            self._abort(open_request)
            return
        open_request.readers = [
            (reader, position) for reader, position in open_request.readers if reader is not request_stream
        ]
        request_stream.fail_stream(ClientGoneError("the reader has left"))
        # The journal keeps the answer for a client that comes back, so the request runs on for a while.
        asyncio.get_running_loop().call_later(self._reconnect_seconds, self._abort_unread, open_request)

    def _abort_unread(self, open_request: OpenRequest) -> None:
        if not open_request.readers and open_request.request_id in self._open:
            self._abort(open_request)

    def _abort(self, open_request: OpenRequest, error: str | None = None) -> None:
        """End a request here, and in the engine before its next step."""
        self._fleet.send(open_request, Finish(open_request.request_id, None, FinishReason.ABORT))
        self.end_request(open_request, FinishReason.ABORT, error)

    def end_request(
        self,
        open_request: OpenRequest,
        reason: FinishReason,
        error: str | None = None,
        error_reason: ErrorReason | None = None,
    ) -> None:
        """End a request here, whatever the engine does."""
        for index in range(open_request.request.params.n):
            if not open_request.output_processor.finished:
                ending = SequenceOutput(open_request.request_id, index, [], finish_reason=reason, error=error)
                ending.error_reason = error_reason
                self._feed(open_request, ending, time.monotonic())

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """End requests and remove every trace of them; their caller gets an error instead."""
        for request_id in request_ids:
            if request_id in self._open:
                self._abort(self._open[request_id])

    def abort_all(self, reason: str) -> None:
        """End every request with `abort`; no series goes on."""
        for series in self._series:
            series.may_go_on = False
        for open_request in list(self._open.values()):
            self._abort(open_request, reason)

    def fail_all(self, error: EngineDeadError) -> None:
        """Fail all requests at once."""
        lost, self._open = self._open, {}  # first: a stream that fails aborts its other requests
        for open_request in lost.values():
            self._forget(open_request)
            self._fail_readers(open_request, error)

    def _fail_readers(self, open_request: OpenRequest, error: PenstockError) -> None:
        for reader, _ in open_request.readers:
            reader.fail_stream(error)


def single_tokens(output: SequenceOutput) -> list[SequenceOutput]:
    """Split an output into outputs of one token each: the first carries the prompt's data, the last the ending."""
    if len(output.token_ids) < 2:
        return [output]
    parts = [
        SequenceOutput(output.request_id, output.index, [token], output.logprobs and output.logprobs[index : index + 1])
        for index, token in enumerate(output.token_ids)
    ]
    first, last = parts[0], parts[-1]
    first.first_scheduled, first.num_cached_tokens = output.first_scheduled, output.num_cached_tokens
    first.prompt = output.prompt
    last.finish_reason, last.error, last.error_reason = output.finish_reason, output.error, output.error_reason
    last.score = output.score
    return parts


def _signature(request: Request) -> _Signature:
    """A key that is equal for retries of one request, even if their random seeds differ."""
    digests = tuple(image.digest for image in request.images)
    return request.prompt_token_ids, replace(request.params, seed=0), request.adapter, digests
