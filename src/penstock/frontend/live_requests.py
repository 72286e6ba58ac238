"""The requests of an engine in this process: a caller that waits for one of them steps the engine for all."""

import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Protocol

from penstock.api.request import FinishReason, Request, SequenceOutput
from penstock.errors import EngineDeadError
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor
from penstock.system.host import interrupts_held


class Core(Protocol):
    """An engine core in this process."""

    def add_request(self, request: Request) -> None: ...
    def finish_request(self, request_id: str, index: int | None, reason: FinishReason) -> None: ...
    def step(self) -> Sequence[SequenceOutput]: ...


class LiveRequests:
    """The requests in progress. Not thread-safe; one thread may interleave several iterations."""

    def __init__(self, core: Core) -> None:
        self._core: Core | None = core
        self._live: dict[str, OutputProcessor] = {}
        self._inboxes: dict[str, deque[CompletionDelta]] = {}  # of the live requests that are streamed
        self._ended: dict[str, deque[str]] = {}  # of the other live requests: where their ends are noted

    def close(self) -> None:
        """Forget the engine: requests in progress fail with EngineDeadError when they are continued."""
        self._core = None

    def finished(self, pending: Sequence[OutputProcessor]) -> Generator[int, None, None]:
        """Run requests to completion; yields the index of each as it ends. Leaving the loop early aborts the others."""
        indices = {processor.request.request_id: index for index, processor in enumerate(pending)}
        ended = deque[str]()
        interrupt: KeyboardInterrupt | None = None
        try:
            for output_processor in pending:
                self._ended[output_processor.request.request_id] = ended
                self._add(output_processor)
            while indices and interrupt is None:
                try:
                    self._step()
                except KeyboardInterrupt as error:  # the step is complete: what it finished is still returned
                    interrupt = error
                while ended:
                    yield indices.pop(ended.popleft())
        finally:
            self._abort(pending)
        if interrupt is not None:
            raise interrupt

    def stream(self, pending: OutputProcessor) -> Generator[CompletionDelta, None, None]:
        """Run a request; yields its deltas as they come. Leaving the loop early aborts it."""
        inbox = self._inboxes[pending.request.request_id] = deque[CompletionDelta]()
        try:
            self._add(pending)
            while inbox or not pending.finished:
                if not inbox:
                    self._step()
                while inbox:
                    yield inbox.popleft()
        finally:
            self._abort([pending])

    @property
    def _engine(self) -> Core:
        if self._core is None:
            raise EngineDeadError("this LLM is closed")
        return self._core

    def _add(self, output_processor: OutputProcessor) -> None:
        with interrupts_held():
            self._live[output_processor.request.request_id] = output_processor
            self._engine.add_request(output_processor.request)

    def _step(self) -> None:
        """Run one engine step and deliver its outputs to all live requests, including those of other iterations.

        Ctrl-C is deferred to the step's end: an interrupted step would leave the engine unusable.
        """
        with interrupts_held():
            self._run_step(self._engine)

    def _run_step(self, core: Core) -> None:
        outputs, now = core.step(), time.monotonic()
        for output in outputs:
            request_id = output.request_id
            output_processor = self._live.get(request_id)
            delta = output_processor.process_output(output, now) if output_processor else None
            if output_processor is None or delta is None:
                continue
            if request_id in self._inboxes:
                self._inboxes[request_id].append(delta)
            if delta.engine_goes_on:
                core.finish_request(request_id, output.index, FinishReason.STOP)
            if output_processor.finished:
                del self._live[request_id]
                if request_id in self._ended:
                    self._ended[request_id].append(request_id)

    def _abort(self, pending: Sequence[OutputProcessor]) -> None:
        """Remove ended requests, and abort unfinished ones that the caller has left."""
        with interrupts_held():
            for output_processor in pending:
                request_id = output_processor.request.request_id
                self._inboxes.pop(request_id, None)
                self._ended.pop(request_id, None)
                if self._live.pop(request_id, None) is not None and self._core is not None:
                    self._core.finish_request(request_id, None, FinishReason.ABORT)
