"""The engine as the server's event loop sees it: requests in, streams of text out, whatever becomes of its process.

    accept() ──Accepted──> open() ──RequestStream──> async for deltas ...       (a consumer per call)
                              │ OpenRequests: Add, Finish    ▲ CompletionDelta
                              ▼                              │
                          Supervisor ────StepOutputs──> an OutputProcessor a request

Tokens become text as they arrive, whether or not anyone reads: a stop string ends its sequence at once, and a slow
consumer finds all that came meanwhile in one piece. When the engine dies, the next one gets each unfinished request
together with the tokens that it had; with the same prompt, parameters and seed it goes on as if nothing had happened.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.checkpoint import resolve_path
from penstock.config import EngineConfig
from penstock.engine.info import EngineInfo
from penstock.engine.protocol import Expire, FromEngine, Pong, StepOutputs
from penstock.errors import (
    EngineDeadError,
    InvalidRequestError,
    JournalUnavailableError,
    PenstockError,
    QuarantinedError,
)
from penstock.frontend.history import History, Meter
from penstock.frontend.input_processor import InputProcessor, PromptEncoder
from penstock.frontend.large_work import LargeWork
from penstock.frontend.limits import ANYONE, Admission, Caller, QueueLimits
from penstock.frontend.link import EngineLink
from penstock.frontend.open_requests import RECONNECT_SECONDS, OpenRequests, RequestStream
from penstock.frontend.output_processor import OutputProcessor
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import Entry, Row, row_of
from penstock.frontend.recovery.replay import RequestReplay, entries_of
from penstock.frontend.supervisor import (
    DEFAULT_RESTARTS,
    Death,
    RestartPolicy,
    Supervisor,
    await_ready,
    start_limit,
)
from penstock.metrics import Metrics
from penstock.request import FinishReason, Request, RequestOutput
from penstock.sampling_params import SamplingParams
from penstock.structured.inspector import Inspector
from penstock.tokenizer import Tokenizer

logger = logging.getLogger("penstock.engine")

STEP_DEADLINE = 30.0
TOO_LONG_NOW = "the engine was restarted with less memory, and no longer holds a request so long"
ANOTHER_MODEL = "the server was restarted with another model, or with less memory"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that passed every check, and what turning its tokens back into an answer takes."""

    request: Request
    params: SamplingParams
    prompt: str | None
    caller: Caller


class AsyncEngine:
    """An engine process, all requests in it, and the processes that follow it if it dies. Made by `start`."""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        link: EngineLink,
        step_deadline: float = STEP_DEADLINE,
        limits: QueueLimits | None = None,
        journal: Journal | None = None,
        *,
        restarts: RestartPolicy = DEFAULT_RESTARTS,
        reconnect_seconds: float = RECONNECT_SECONDS,
    ) -> "AsyncEngine":
        """Wait until the engine can make steps, and load the tokenizer meanwhile. Fails or is cancelled: all is closed.

        Args:
            link: to an engine process that was launched.
            step_deadline: seconds without a step, while there is work, after which the engine hangs; more for large
                steps (`penstock.frontend.supervisor`).
            journal: what is unfinished in it is taken up; it is closed with the engine.
            reconnect_seconds: how long a journaled request goes on without a reader before it is aborted.

        Raises:
            ConfigError: options or checkpoint are at fault.
            EngineDeadError: the engine process ended for another reason.
        """
        began = time.monotonic()
        loading = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, config.model.model))
        try:
            info = await await_ready(link)
            supervisor = Supervisor(link, step_deadline, start_limit(time.monotonic() - began), restarts)
            tokenizer = await asyncio.shield(loading)
            engine = cls(config, supervisor, info, tokenizer, limits or QueueLimits(), journal, reconnect_seconds)
            engine._take_up_journal()
        except BaseException:
            await link.close(grace=0.0)
            if journal is not None:
                await journal.close()
            await _close_loaded(loading)
            raise
        supervisor.supervise(engine)
        return engine

    def __init__(
        self,
        config: EngineConfig,
        supervisor: Supervisor,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        limits: QueueLimits,
        journal: Journal | None,
        reconnect_seconds: float,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._config = config
        self._limits = limits
        self._supervisor = supervisor
        self._journal = journal
        self._refusal: PenstockError | None = None
        self._inspector = Inspector(info.model_path, info.vocab_size)
        self._input_processor = InputProcessor(tokenizer, info)
        self.large_work = LargeWork()
        self.prompts = PromptEncoder(tokenizer, self.large_work)
        self.given_up = asyncio.Event()
        self.metrics = Metrics()
        self.history = History(config.scheduler.policy)
        self.admission = Admission(limits, info.max_num_seqs, lambda request_id: supervisor.send(Expire(request_id)))
        self._meter = Meter(self.metrics)
        self._meter.set_engine_info(info)
        self._requests = OpenRequests(supervisor, self._meter, self.history, self.admission, journal, reconnect_seconds)
        self._replay = RequestReplay(journal, tokenizer, self._requests.output_processor)

    @property
    def pid(self) -> int:
        """Of the engine process, the latest one."""
        return self._supervisor.pid

    def _take_up_journal(self) -> None:
        if self._journal is not None:
            self._journal.start(self.metrics)
        for entry, output_processor in self._replay.unfinished():
            self._take_up(entry, output_processor)
        self._requests.hand_over()

    def _take_up(self, entry: Entry, output_processor: OutputProcessor) -> None:
        """Go on with a request of the journal, or end it with an error if this engine could not have accepted it."""
        request = output_processor.request
        self._requests.begin_request(output_processor, [])
        if entry.record.model != self.info.model_path or not self._input_processor.fits(request):
            self._requests.end_request(request.request_id, FinishReason.ERROR, ANOTHER_MODEL)
            return
        try:
            self._input_processor.check(request.prompt_token_ids, entry.record.params)
        except InvalidRequestError as error:
            refused = f"the request was accepted by another server, and cannot be served by this one: {error}"
            self._requests.end_request(request.request_id, FinishReason.ERROR, refused)

    async def close(self) -> None:
        """End the engine process, and every open generation with an error."""
        self.lose(EngineDeadError("the server is shutting down"))
        await self._supervisor.close()
        await asyncio.to_thread(self.large_work.close)
        await asyncio.to_thread(self._inspector.close)
        if self.tokenizer is not None:
            await asyncio.to_thread(self.tokenizer.close)
        if self._journal is not None:
            await self._journal.close()

    def refuse(self, reason: PenstockError) -> None:
        """Take no new request, for this reason; what is open goes on."""
        self._refusal = reason

    @property
    def refusal(self) -> PenstockError | None:
        """Why new requests are not taken; None while they are."""
        return self._refusal

    @property
    def restarting(self) -> bool:
        """Whether an engine process is being replaced."""
        return self._supervisor.down is not None and not self.given_up.is_set()

    async def drained(self) -> None:
        """Wait until no request is open. To be called when new ones are refused."""
        await self._requests.drained()

    def abort_all(self, reason: str) -> None:
        """End every open request with `abort`."""
        self._requests.abort_all(reason)

    def accept_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        priority: int = 0,
        caller: Caller = ANYONE,
    ) -> Accepted:
        """Check a request once and for all; nothing runs yet.

        Raises:
            InvalidRequestError: the engine could not serve it, or the caller may not ask for it.
            QuarantinedError: an equal request was what engines died of.
        """
        policy = self._config.scheduler.policy
        if priority and policy == "fcfs":
            raise InvalidRequestError(f"priority has no effect under --policy {policy}: leave it out", "priority")
        caller.check_priority(priority)
        request = self._input_processor.make_request(
            token_ids,
            params,
            request_id=request_id,
            arrival=time.monotonic(),
            priority=priority,
            namespace=caller.namespace,
            tenant=caller.tenant,
        )
        if self._requests.is_quarantined(request):
            raise QuarantinedError("an equal request made the engine fail more than once: it is not run again")
        return Accepted(request, params, prompt, caller)

    async def check_structured(self, params: SamplingParams) -> None:
        """Find out whether the form that an answer must have can be had; nothing waits for that but the caller.

        Raises:
            InvalidRequestError: it cannot, and the message says why.
        """
        if params.structured is not None:
            verdict = self._inspector.submit(params.structured)
            await asyncio.shield(asyncio.wrap_future(verdict))  # others may wait for the same

    def open(
        self,
        accepted: Sequence[Accepted],
        *,
        stream: bool,
        queue_timeout: float | None = None,
        alias: str | None = None,
    ) -> RequestStream:
        """Hand the requests of one call to the engine.

        Args:
            stream: whether the consumer iterates or only waits for the results.
            queue_timeout: seconds that each may wait to run; at most the server's limit, which None stands for.
            alias: another name of the call, for the journal and the history.

        Raises:
            LimitError: the queue is full, the caller's allowance is used up, or the journal cannot be written.
            EngineDeadError: there is no engine any more.
            ShuttingDownError: what is open is being finished, and nothing else.
        """
        if self._refusal is not None:
            raise self._refusal
        rows: list[Row] = []
        if self._journal is not None:
            self._journal.check()
            call = [(one.request, one.params, one.prompt) for one in accepted]
            rows = [row_of(entry) for entry in entries_of(call, self.info.model_path, alias)]
        self.admission.enter([one.request for one in accepted], accepted[0].caller, queue_timeout)
        output_processors = {
            one.request.request_id: OutputProcessor(one.request, one.params, self.tokenizer, one.prompt)
            for one in accepted
        }
        request_stream = RequestStream(self._requests.leave, output_processors, stream, self._limits.max_unread_tokens)
        if self._journal is not None:
            self._journal.add_entries(rows)
        for one in accepted:
            self._requests.begin_request(output_processors[one.request.request_id], [request_stream])
            self.history.accepted(one.request, alias)
        self._requests.hand_over()
        return request_stream

    # ── what the journal holds ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def journaled(self) -> bool:
        """Whether requests outlive this process, and can be asked for again."""
        return self._journal is not None

    @property
    def journal_trouble(self) -> str | None:
        """Why no request can be accepted into the journal now; None if they can, or if there is none."""
        trouble = None if self._journal is None else self._journal.trouble
        return trouble and f"the journal cannot be written: {trouble}"

    async def recorded(self, accepted: Sequence[Accepted]) -> None:
        """Wait until the requests of a call that was opened are on disk, if they are to be there at all.

        Raises:
            JournalUnavailableError: the journal cannot be written; the requests are ended and leave no trace in it.
        """
        if self._journal is not None:
            try:
                await self._journal.flush()
            except JournalUnavailableError:
                request_ids = [one.request.request_id for one in accepted]
                self._requests.withdraw(request_ids)
                self._journal.withdraw(request_ids)
                raise

    async def look_up(self, name: str, tenant: str) -> list[tuple[Entry, RequestOutput]]:
        """The requests of a tenant's call, as far as they got, by one of its names; [] if there is no such call."""
        return [
            (entry, output_processor.result()) for entry, output_processor in await self._replay.look_up(name, tenant)
        ]

    async def reopen(self, name: str, accepted: Sequence[Accepted]) -> RequestStream:
        """Read a call again from its first token on, whether it runs or has ended.

        Args:
            accepted: what was asked for then, once more.

        Raises:
            InvalidRequestError: there is no such call, or it asked for something else.
        """
        asked = [(one.request.prompt_token_ids, one.params) for one in accepted]
        told, deltas = await self._replay.tell_again(name, accepted[0].request.tenant, asked)
        output_processors = {output_processor.request.request_id: output_processor for output_processor in told}
        request_stream = RequestStream(
            self._requests.leave, output_processors, True, self._limits.max_unread_tokens, deltas
        )
        for request_id in output_processors:
            self._requests.join(request_id, request_stream)
        return request_stream

    async def trouble(self) -> str | None:
        """What is wrong with the engine, or None: dead, no step in time with work to do, or no answer when idle."""
        return await self._supervisor.trouble(self.engine_is_busy)

    # ── calls by the supervisor ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def engine_is_busy(self) -> bool:
        return self._requests.num_in_engine > 0

    def engine_said(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._meter.record_stats(message.stats)
            if message.step is not None:
                self._meter.record_step(message.step)
                self.history.record_step(message.step)
            self._requests.deliver_outputs(message.outputs, message.stats.steps)
        elif isinstance(message, Pong):
            self._meter.record_stats(message.stats)

    def engine_died(self, death: Death) -> None:
        self.metrics.restarts.add(1)
        self._requests.engine_died(death)

    def engine_is_up(self, info: EngineInfo) -> None:
        self.info = info
        self._input_processor.engine_changed(info)
        self._meter.set_engine_info(info)
        self._requests.end_unless(self._input_processor.fits, TOO_LONG_NOW)
        self._requests.hand_over()

    def engine_given_up(self, error: EngineDeadError) -> None:
        self.lose(error)
        self.given_up.set()

    def lose(self, error: EngineDeadError) -> None:
        """Fail all open requests at once, without waiting for the engine."""
        if not isinstance(self._refusal, EngineDeadError):
            self._refusal = error
        self._requests.lose(error)


def _load_tokenizer(model: str | None) -> Tokenizer | None:
    tokenizer = Tokenizer.load(resolve_path(model))
    if tokenizer is not None:
        tokenizer.start_chat_templates()
    return tokenizer


async def _close_loaded(loading: "asyncio.Future[Tokenizer | None]") -> None:
    """Close the tokenizer of an engine that failed to start; the failure is raised elsewhere."""
    with contextlib.suppress(Exception):
        tokenizer = await loading
        if tokenizer is not None:
            await asyncio.to_thread(tokenizer.close)
