"""The engine as the server's event loop sees it: requests in, streams of text out, whatever becomes of its process.

    accept() ──Accepted──> open() ──Generation──> async for deltas ...       (a consumer per call)
                              │ Ledger: Add, Finish          ▲ CompletionDelta
                              ▼                              │
                          Supervisor ────StepOutputs──> an Assembler a request

Tokens become text as they arrive, whether or not anyone reads: a stop string ends its sequence at once, and a slow
consumer finds all that came meanwhile in one piece. When the engine dies, the next one gets each unfinished request
together with the tokens that it had; with the same prompt, parameters and seed it goes on as if nothing had happened.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from penstock.checkpoint import resolve_path
from penstock.config import EngineConfig
from penstock.core.scheduler import EXPIRED
from penstock.engine.assembler import Assembler
from penstock.engine.generation import Generation
from penstock.engine.info import EngineInfo
from penstock.engine.intake import Intake
from penstock.engine.ledger import Ledger
from penstock.engine.limits import ANYONE, Admission, Caller, QueueLimits
from penstock.engine.link import EngineLink
from penstock.engine.meter import Meter
from penstock.engine.protocol import Add, Expire, Finish, FromEngine, Pong, StepOutputs
from penstock.engine.supervisor import Death, Supervisor
from penstock.errors import (
    EngineDeadError,
    InvalidRequestError,
    PenstockError,
    QuarantinedError,
    QueueTimeoutError,
)
from penstock.metrics import Metrics
from penstock.request import FinishReason, Request, ResolvedParams, SamplingParams, SequenceOutput
from penstock.tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger("penstock.engine")

STEP_DEADLINE = 30.0
MAX_QUARANTINED = 64
TOO_LONG_NOW = "the engine was restarted with less memory, and no longer holds a request so long"
LONG_TEXT = 4096
"""Characters from which tokenising, some milliseconds then, leaves the event loop for a thread."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that passed every check, and what turning its tokens back into an answer takes."""

    request: Request
    params: SamplingParams
    prompt: str | None
    caller: Caller


@dataclass(slots=True)
class _Live:
    """A request that the engine works on."""

    request: Request
    assembler: Assembler
    generation: Generation


class AsyncEngine:
    """An engine process, launched already, all requests in it, and those that follow it if it dies.

    `await start()` before anything else; `info` and `tokenizer` (None: the checkpoint has none) are valid from then on.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None
    admission: Admission

    def __init__(
        self,
        config: EngineConfig,
        link: EngineLink,
        step_deadline: float = STEP_DEADLINE,
        limits: QueueLimits | None = None,
    ) -> None:
        """
        Args:
            step_deadline: seconds without a step, while there is work, after which the engine hangs; more for large
                steps (`penstock.engine.supervisor`).
        """
        self._config = config
        self._limits = limits or QueueLimits()
        self._supervisor = Supervisor(link, step_deadline)
        self._ledger = Ledger()
        self._quarantine: deque[tuple[tuple[int, ...], ResolvedParams]] = deque(maxlen=MAX_QUARANTINED)
        self._live: dict[str, _Live] = {}
        self._refusal: PenstockError | None = None
        self._one_less = asyncio.Event()
        self.given_up = asyncio.Event()
        self.metrics = Metrics()
        self._meter = Meter(self.metrics)

    @property
    def pid(self) -> int:
        """Of the engine process, the latest one."""
        return self._supervisor.pid

    async def start(self) -> EngineInfo:
        """Wait until the engine can make steps; meanwhile, the tokenizer is loaded here.

        Raises:
            ConfigError: options or checkpoint are at fault.
            EngineDeadError: the engine process ended for another reason.
        """
        tokenizer = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, self._config.model.model))
        tokenizer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the engine's word goes first
        self.info = await self._supervisor.start(self)
        self.tokenizer = await tokenizer
        self._intake = Intake(self.tokenizer, self.info)
        self.admission = Admission(
            self._limits, self.info.max_num_seqs, lambda request_id: self._supervisor.send(Expire(request_id))
        )
        self._meter.begin(self.info)
        return self.info

    async def close(self) -> None:
        """End the engine process, and every open generation with an error."""
        self.lose(EngineDeadError("the server is shutting down"))
        await self._supervisor.close()

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
        while self._live:
            self._one_less.clear()
            await self._one_less.wait()

    def abort_all(self, reason: str) -> None:
        """End every open request with `abort`."""
        for request_id, live in list(self._live.items()):
            self._supervisor.send(Finish(request_id, None, FinishReason.ABORT))
            self._end(live, FinishReason.ABORT, reason)

    async def encode(self, text: str) -> list[int]:
        """A prompt as token ids.

        Raises:
            InvalidRequestError: the model came without a tokenizer.
        """
        tokenizer = self._need_tokenizer()
        return await _off_loop(len(text), lambda: tokenizer.encode(text))

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """A conversation as token ids, through the checkpoint's chat template.

        Raises:
            InvalidRequestError: there is no tokenizer or template, or the template refuses the conversation.
        """
        tokenizer = self._need_tokenizer()
        size = sum(len(str(message.get("content"))) for message in messages) + len(options.get("prefill", ""))
        return await _off_loop(size, lambda: tokenizer.encode_chat([dict(m) for m in messages], **options))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError("the model came without a tokenizer: send token ids to /v1/completions")
        return self.tokenizer

    def accept(
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
        request = self._intake.accept(
            token_ids,
            params,
            request_id=request_id,
            arrival=time.monotonic(),
            priority=priority,
            namespace=caller.namespace,
            tenant=caller.tenant,
        )
        if self._quarantine and _signature(request) in self._quarantine:
            raise QuarantinedError("an equal request made the engine fail more than once: it is not run again")
        return Accepted(request, params, prompt, caller)

    def open(self, accepted: Sequence[Accepted], *, stream: bool, queue_timeout: float | None = None) -> Generation:
        """Hand the requests of one call to the engine.

        Args:
            stream: whether the consumer iterates or only waits for the results.
            queue_timeout: seconds that each may wait to run; at most the server's limit, which None stands for.

        Raises:
            LimitError: the queue is full, or the caller's allowance is used up.
            EngineDeadError: there is no engine any more.
            ShuttingDownError: what is open is being finished, and nothing else.
        """
        if self._refusal is not None:
            raise self._refusal
        self.admission.enter([one.request for one in accepted], accepted[0].caller, queue_timeout)
        assemblers = {
            one.request.request_id: Assembler(one.request, one.params, self.tokenizer, one.prompt) for one in accepted
        }
        generation = Generation(self.abort, assemblers, stream, self._limits.max_unread_tokens)
        for one in accepted:
            request_id = one.request.request_id
            self._live[request_id] = _Live(one.request, assemblers[request_id], generation)
            self._ledger.add(request_id)
            self._meter.accepted(one.request)
        self._hand_over()
        return generation

    def abort(self, request_id: str) -> None:
        """End a request here and, before its next step, in the engine; idempotent."""
        live = self._live.get(request_id)
        if live is not None:
            self._supervisor.send(Finish(request_id, None, FinishReason.ABORT))
            self._end(live, FinishReason.ABORT)

    async def trouble(self) -> str | None:
        """What is wrong with the engine, or None: dead, no step in time with work to do, or no answer when idle."""
        return await self._supervisor.trouble(self.engine_is_busy)

    # ── what the supervisor tells ────────────────────────────────────────────────────────────────────────────────────

    @property
    def engine_is_busy(self) -> bool:
        return self._ledger.num_in_engine > 0

    def engine_said(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._meter.stepped(message.stats)
            for output in message.outputs:
                live = self._live.get(output.request_id)
                if live is not None:
                    if output.token_ids:
                        self._ledger.progressed(output.request_id, message.stats.steps)
                    self._feed(live, output)
            if self._ledger.num_waiting:
                self._hand_over()
        elif isinstance(message, Pong):
            self._meter.stepped(message.stats)

    def engine_died(self, death: Death) -> None:
        self.metrics.restarts.add(1)
        convict = self._ledger.died(death.under_way, fault=death.fault)
        if convict is not None:
            live = self._live[convict]
            logger.error("request %s is ended: with it alone to blame, the engine %s", convict, death.reason)
            self._quarantine.append(_signature(live.request))
            self._end(live, FinishReason.ERROR, f"the request made the engine fail more than once: it {death.reason}")

    def engine_is_up(self, info: EngineInfo) -> None:
        self.info = info
        self._intake.engine_changed(info)
        self._meter.begin(info)
        for live in list(self._live.values()):
            if not self._intake.fits(live.request):
                self._end(live, FinishReason.ERROR, TOO_LONG_NOW)
        self._hand_over()

    def engine_given_up(self, error: EngineDeadError) -> None:
        self.lose(error)
        self.given_up.set()

    def _hand_over(self) -> None:
        if self._supervisor.down is None:
            for request_id in self._ledger.due():
                live = self._live[request_id]
                self._supervisor.send(Add(live.request, live.assembler.resume_point()))

    # ── a request's life ─────────────────────────────────────────────────────────────────────────────────────────────

    def _feed(self, live: _Live, output: SequenceOutput) -> None:
        request_id, now = output.request_id, time.monotonic()
        delta = live.assembler.feed(output, now)
        if delta is not None and delta.finish_reason is not None and output.finish_reason is None:
            self._supervisor.send(Finish(request_id, output.index, FinishReason.STOP))
        self._meter.output(live.request, output, delta, now)
        self.admission.output(live.request, len(output.token_ids))
        if live.assembler.finished:
            del self._live[request_id]
            self._ledger.remove(request_id)
            self._meter.finished(live.request, now)
            self.admission.left(live.request)
            self._one_less.set()
        if output.error == EXPIRED:
            waited = now - live.request.arrival
            live.generation.fail(QueueTimeoutError(f"the request waited {waited:.1f} s in the queue"))
        live.generation.deliver(request_id, delta)

    def _end(self, live: _Live, reason: FinishReason, error: str | None = None) -> None:
        """End a request here, whatever the engine does."""
        for index in range(live.request.params.n):
            if not live.assembler.finished:
                ending = SequenceOutput(live.request.request_id, index, [], finish_reason=reason, error=error)
                self._feed(live, ending)

    def lose(self, error: EngineDeadError) -> None:
        """Tell everybody that nothing more will come, at once; what the engine does is not waited for."""
        if not isinstance(self._refusal, EngineDeadError):
            self._refusal = error
        lost, self._live = self._live, {}
        for request_id, live in lost.items():
            self._ledger.remove(request_id)
            self.admission.left(live.request)
            live.generation.fail(error)
        self._one_less.set()


def _signature(request: Request) -> tuple[tuple[int, ...], ResolvedParams]:
    """What makes two requests the same, whatever their seeds."""
    return request.prompt_token_ids, replace(request.params, seed=0)


def _load_tokenizer(model: str | None) -> Tokenizer | None:
    return Tokenizer.load(resolve_path(model))


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size >= LONG_TEXT else work()
