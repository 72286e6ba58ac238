"""The requests of an engine in this process: a caller that waits for one of them steps the engine for all."""

import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Protocol

from penstock.api.request import FinishReason, Request, SequenceOutput
from penstock.dataclass import dataclass
from penstock.errors import EngineDeadError
from penstock.frontend.output_processor import CompletionDelta, OutputProcessor
from penstock.system.host import interrupts_held


class Core(Protocol):
    """An engine core in this process."""

    def add_request(self, request: Request) -> None: ...
    def finish_request(self, request_id: str, index: int | None, reason: FinishReason) -> None: ...
    def step(self) -> Sequence[SequenceOutput]: ...


@dataclass(frozen=True, slots=True)
class _LiveRequest:
    """A request in progress, with what its iteration waits for."""

    output_processor: OutputProcessor
    inbox: deque[CompletionDelta] | None = None
    """Deltas to yield; None: the request is not streamed."""
    ended: deque[str] | None = None
    """The ids of the iteration's ended requests; None: the request is streamed."""


class LiveRequests:
    """The requests in progress. Not thread-safe; one thread may interleave several iterations."""

    def __init__(self, core: Core) -> None:
        self._core: Core | None = core
        self._live: dict[str, _LiveRequest] = {}

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
                self._add(_LiveRequest(output_processor, ended=ended))
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
        inbox = deque[CompletionDelta]()
        try:
            self._add(_LiveRequest(pending, inbox))
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

    def _add(self, live: _LiveRequest) -> None:
        request = live.output_processor.request
        with interrupts_held():  # Ctrl-C between the two lines would leave the table and the engine apart
            self._live[request.request_id] = live
            self._engine.add_request(request)

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
            live = self._live.get(request_id)  # None: aborted since
            delta = live.output_processor.process_output(output, now) if live else None
            if live is None or delta is None:
                continue
            if live.inbox is not None:
                live.inbox.append(delta)
            if delta.engine_goes_on:
                core.finish_request(request_id, output.index, FinishReason.STOP)
            if live.output_processor.finished:
                del self._live[request_id]
                if live.ended is not None:
                    live.ended.append(request_id)

    def _abort(self, pending: Sequence[OutputProcessor]) -> None:
        """Remove ended requests, and abort unfinished ones that the caller has left."""
        with interrupts_held():
            for output_processor in pending:
                request_id = output_processor.request.request_id
                if self._live.pop(request_id, None) is not None and self._core is not None:
                    self._core.finish_request(request_id, None, FinishReason.ABORT)
