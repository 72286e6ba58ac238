"""The engine as the server's event loop sees it: requests in, streams of text out.

    accept() ──Accepted──> open() ──Generation──> async for deltas ...       (a consumer per call)
                              │ Add, Finish                  ▲ CompletionDelta
                              ▼                              │
                          EngineLink ──────StepOutputs──> one reader task, an Assembler a request

The reader turns tokens into text as they arrive, whether or not anyone reads: a stop string ends its sequence at
once, and a slow consumer finds all that came meanwhile in one piece.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.checkpoint import resolve_path
from penstock.config import EngineConfig
from penstock.engine.assembler import Assembler, CompletionDelta
from penstock.engine.info import EngineInfo
from penstock.engine.intake import Intake
from penstock.engine.link import EngineLink, describe_exit
from penstock.engine.meter import Meter
from penstock.engine.protocol import Add, Failed, Finish, FromEngine, Ping, Pong, Ready, StepOutputs
from penstock.errors import ConfigError, EngineDeadError, EngineError, InvalidRequestError
from penstock.metrics import Metrics
from penstock.request import FinishReason, Request, RequestOutput, SamplingParams, SequenceOutput
from penstock.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters from which tokenising, some milliseconds then, leaves the event loop for a thread."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that passed every check, and what turning its tokens back into an answer takes."""

    request: Request
    params: SamplingParams
    prompt: str | None


class Generation:
    """The requests of one call, in flight together.

    Iterate for what is new, as lists of (position of the request in the call, delta), or wait for `results()`.
    Leaving the `with` block ends, with `abort`, whatever is unfinished.
    """

    def __init__(self, engine: "AsyncEngine", assemblers: dict[str, Assembler], keep_deltas: bool) -> None:
        self._engine = engine
        self._assemblers = assemblers
        self._positions = {request_id: position for position, request_id in enumerate(assemblers)}
        self._keep_deltas = keep_deltas
        self._deltas: list[tuple[int, CompletionDelta]] = []
        self._unfinished = len(assemblers)
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[tuple[int, CompletionDelta]]:
        while True:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                return deltas
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    async def results(self) -> list[RequestOutput]:
        """The complete answers, once all are.

        Raises:
            EngineError: the engine died, or was closed, before that.
        """
        while self.running:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return self.snapshot()

    def snapshot(self) -> list[RequestOutput]:
        """The answers as far as they got."""
        return [assembler.result() for assembler in self._assemblers.values()]

    def abort(self) -> None:
        """End whatever is unfinished, here and in the engine; idempotent."""
        for request_id, assembler in self._assemblers.items():
            if not assembler.finished:
                self._engine.abort(request_id)

    @property
    def running(self) -> bool:
        """Whether anything may still come."""
        return self._unfinished > 0 and self._error is None

    def deliver(self, request_id: str, delta: CompletionDelta | None) -> None:
        """Called by the engine: something came for a request, perhaps its end."""
        if delta is not None and self._keep_deltas:
            self._deltas.append((self._positions[request_id], delta))
        if self._assemblers[request_id].finished:
            self._unfinished -= 1
        if self._keep_deltas or not self._unfinished:
            self._news.set()

    def fail(self, error: EngineError) -> None:
        """Called by the engine: nothing will come any more."""
        self._error = error
        self._news.set()


@dataclass(slots=True)
class _Live:
    """A request that the engine works on."""

    request: Request
    assembler: Assembler
    generation: Generation


class AsyncEngine:
    """An engine process, launched already, and all requests in it. `await start()` before anything else.

    `info` and `tokenizer` (None: the checkpoint has none) are valid from then on.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None

    def __init__(self, config: EngineConfig, link: EngineLink) -> None:
        self._config = config
        self._link = link
        self._live: dict[str, _Live] = {}
        self._ended: EngineError | None = None
        self._failure: str | None = None
        self._last_heard = time.monotonic()
        self._pong: asyncio.Event = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.metrics = Metrics()
        self._meter = Meter(self.metrics)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._link.pid

    async def start(self) -> EngineInfo:
        """Wait until the engine can make steps; meanwhile, the tokenizer is loaded here.

        Raises:
            ConfigError: options or checkpoint are at fault.
            EngineDeadError: the engine process ended for another reason.
        """
        tokenizer = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, self._config.model.model))
        tokenizer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the engine's word goes first
        self.info = await self._await_ready()
        self.tokenizer = await tokenizer
        self._intake = Intake(self.tokenizer, self.info)
        self._meter.begin(self.info)
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._watch())]
        return self.info

    async def _await_ready(self) -> EngineInfo:
        first = asyncio.ensure_future(self._link.receive())
        exited = asyncio.ensure_future(self._link.exited())
        await asyncio.wait({first, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            await asyncio.wait({first}, timeout=0.1)  # its last words may have been on their way
        exited.cancel()
        if not first.done():
            first.cancel()
            raise EngineDeadError(f"the engine process {describe_exit(await self._link.exited())} while it started")
        message = first.result()
        if isinstance(message, Failed):
            raise ConfigError(message.message) if message.mistake else EngineDeadError(message.message)
        assert isinstance(message, Ready)
        return message.info

    async def close(self) -> None:
        """End the engine process, and every open generation with an error."""
        self._end(EngineDeadError("the server is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close(grace=5.0 if self._tasks else 0.0)  # one that still loads its model has nothing to end

    def refuse(self, reason: str) -> None:
        """End every open generation, and take no new one, for this reason."""
        for request_id in list(self._live):
            self._link.send(Finish(request_id, None, FinishReason.ABORT))
        self._end(EngineDeadError(reason))

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
    ) -> Accepted:
        """Check a request once and for all; nothing runs yet.

        Raises:
            InvalidRequestError: the engine could not serve it.
        """
        policy = self._config.scheduler.policy
        if priority and policy == "fcfs":
            raise InvalidRequestError(f"priority has no effect under --policy {policy}: leave it out", "priority")
        now = time.monotonic()
        request = self._intake.accept(token_ids, params, request_id=request_id, arrival=now, priority=priority)
        return Accepted(request, params, prompt)

    def open(self, accepted: Sequence[Accepted], *, stream: bool) -> Generation:
        """Hand requests to the engine; `stream`: whether the consumer iterates or only waits for the results.

        Raises:
            EngineDeadError: there is no engine any more.
        """
        if self._ended is not None:
            raise self._ended
        assemblers = {
            one.request.request_id: Assembler(one.request, one.params, self.tokenizer, one.prompt) for one in accepted
        }
        generation = Generation(self, assemblers, stream)
        if not self._live:
            self._last_heard = time.monotonic()  # an idle engine had nothing to say
        for one in accepted:
            request_id = one.request.request_id
            self._live[request_id] = _Live(one.request, assemblers[request_id], generation)
            self._link.send(Add(one.request))
            self._meter.accepted(one.request)
        return generation

    def abort(self, request_id: str) -> None:
        """End a request here and, before its next step, in the engine; idempotent."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._link.send(Finish(request_id, None, FinishReason.ABORT))
        for index in range(live.request.params.n):
            if not live.assembler.finished:
                self._feed(live, SequenceOutput(request_id, index, [], finish_reason=FinishReason.ABORT))

    async def check_health(self, deadline: float) -> str | None:
        """What is wrong, or None: dead, no step for `deadline` seconds with work to do, or no answer when idle."""
        if self._ended is not None:
            return str(self._ended)
        silent = time.monotonic() - self._last_heard
        if self._live:
            return None if silent < deadline else f"no step for {silent:.1f} s with {len(self._live)} requests open"
        self._pong.clear()
        self._link.send(Ping())
        try:
            await asyncio.wait_for(self._pong.wait(), min(deadline, 1.0))
        except asyncio.TimeoutError:
            return None if self._live else "the idle engine does not answer"
        return None if self._ended is None else str(self._ended)

    async def _read(self) -> None:
        while True:
            self._receive(await self._link.receive())

    async def _watch(self) -> None:
        code = await self._link.exited()
        self._tasks[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[0]
        for message in await self._link.receive_rest():
            self._receive(message)
        reason = f": {self._failure}" if self._failure else ""
        self._end(EngineDeadError(f"the engine process {describe_exit(code)}{reason}"))

    def _receive(self, message: FromEngine) -> None:
        self._last_heard = time.monotonic()
        if isinstance(message, StepOutputs):
            self._meter.stepped(message.stats)
            for output in message.outputs:
                live = self._live.get(output.request_id)
                if live is not None:
                    self._feed(live, output)
        elif isinstance(message, Pong):
            self._meter.stepped(message.stats)
        elif isinstance(message, Failed):
            self._failure = message.message
        self._pong.set()

    def _feed(self, live: _Live, output: SequenceOutput) -> None:
        request_id, now = output.request_id, time.monotonic()
        delta = live.assembler.feed(output, now)
        if delta is not None and delta.finish_reason is not None and output.finish_reason is None:
            self._link.send(Finish(request_id, output.index, FinishReason.STOP))
        self._meter.output(live.request, output, delta, now)
        if live.assembler.finished:
            del self._live[request_id]
            self._meter.finished(live.request, now)
        live.generation.deliver(request_id, delta)

    def _end(self, error: EngineDeadError) -> None:
        if self._ended is None:
            self._ended = error
        for live in self._live.values():
            live.generation.fail(error)
        self._live.clear()
        self._pong.set()


def _load_tokenizer(model: str | None) -> Tokenizer | None:
    return Tokenizer.load(resolve_path(model))


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size >= LONG_TEXT else work()
