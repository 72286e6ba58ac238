"""Requests that wait for something before the scheduler hears of them: a grammar that is being compiled.

They join in their old place in the order of arrival. Whatever else a request may need first is one more future.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from penstock.core.scheduler import Scheduler
from penstock.errors import PenstockError
from penstock.request import FinishReason, Request, Resumed

PAUSE = 0.02
"""Seconds that an engine without other work waits for a future, before it looks for messages again."""


@dataclass(slots=True)
class _Pending:
    request: Request
    resumed: Resumed
    ordinal: int
    awaited: "Sequence[Future[Any]]"

    @property
    def error(self) -> BaseException | None:
        """Why the request cannot be served, if one of the futures failed."""
        return next((error for one in self.awaited if one.done() and (error := one.exception())), None)

    @property
    def is_settled(self) -> bool:
        return all(one.done() for one in self.awaited) or self.error is not None


class PendingRequests:
    """Stands before a scheduler, and numbers what arrives."""

    def __init__(self, awaited_by: "Callable[[Request], Sequence[Future[Any]]]") -> None:
        """
        Args:
            awaited_by: starts what a request waits for; nothing, if it can join at once.
        """
        self._awaited_by = awaited_by
        self._pending: dict[str, _Pending] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add_request(self, scheduler: Scheduler, request: Request, resumed: Resumed) -> None:
        """A request arrives: it goes to the scheduler now, or when all that it waits for is ready."""
        ordinal = self._num_arrived
        self._num_arrived += 1
        awaited = self._awaited_by(request)
        if not awaited:
            scheduler.add_request(request, resumed, ordinal)
        else:
            self._pending[request.request_id] = _Pending(request, resumed, ordinal, awaited)
            self.pass_on(scheduler)

    def pass_on(self, scheduler: Scheduler) -> None:
        """Hand over the requests that are ready; if there is nothing else to do, wait a little for one."""
        if self._pending and not scheduler.has_work and not any(one.is_settled for one in self._pending.values()):
            open_futures = [one for pending in self._pending.values() for one in pending.awaited if not one.done()]
            wait(open_futures, PAUSE, FIRST_COMPLETED)
        for request_id, pending in list(self._pending.items()):
            if pending.is_settled:
                self.release(scheduler, request_id)
                if (error := pending.error) is not None:
                    reason = str(error) if isinstance(error, PenstockError) else f"it could not be prepared: {error}"
                    scheduler.finish_request(request_id, None, FinishReason.ERROR, reason)

    def release(self, scheduler: Scheduler, request_id: str) -> None:
        """Hand over a request, ready or not, as it is to be ended; perhaps it is none of these."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            scheduler.add_request(pending.request, pending.resumed, pending.ordinal)
