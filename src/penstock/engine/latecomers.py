"""Requests whose grammar is still being compiled: the scheduler hears of them once it is ready, in their old place."""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from penstock.core.scheduler import Scheduler
from penstock.errors import PenstockError
from penstock.request import FinishReason, Request, Resumed
from penstock.structured.grammar import Grammar
from penstock.structured.masks import Grammars

PAUSE = 0.02
"""Seconds for which an engine without other work waits for a grammar, before it looks for messages again."""


@dataclass(slots=True)
class _Late:
    request: Request
    resumed: Resumed
    ordinal: int
    grammar: "Future[Grammar]"


class Latecomers:
    """Stands before a scheduler, and numbers what arrives."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._late: dict[str, _Late] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._late)

    def add(self, scheduler: Scheduler, request: Request, resumed: Resumed) -> None:
        """A request arrives: now it goes to the scheduler, or when its grammar is ready."""
        ordinal = self._num_arrived
        self._num_arrived += 1
        if request.params.structured is None:
            scheduler.add(request, resumed, ordinal)
        else:
            grammar = self._grammars.compile(request.params.structured)
            self._late[request.request_id] = _Late(request, resumed, ordinal, grammar)
            self.pass_on(scheduler)

    def pass_on(self, scheduler: Scheduler) -> None:
        """Hand over the requests that are ready; if there is nothing else to do, wait a little for one."""
        if self._late and not scheduler.has_work:
            wait([late.grammar for late in self._late.values()], PAUSE, FIRST_COMPLETED)
        for request_id in [name for name, late in self._late.items() if late.grammar.done()]:
            error = self._late[request_id].grammar.exception()
            self.release(scheduler, request_id)
            if error is not None:
                reason = str(error) if isinstance(error, PenstockError) else f"its grammar failed: {error}"
                scheduler.finish(request_id, None, FinishReason.ERROR, reason)

    def release(self, scheduler: Scheduler, request_id: str) -> None:
        """Hand over a request, ready or not, as it is to be ended; perhaps it is none of these."""
        late = self._late.pop(request_id, None)
        if late is not None:
            scheduler.add(late.request, late.resumed, late.ordinal)
