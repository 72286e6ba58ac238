"""Virtual time."""

import heapq
from collections.abc import Callable
from enum import IntEnum

from penstock.dataclass import dataclass


class Kind(IntEnum):
    """Order of simultaneous events: a request that arrives when a step ends can join the next step."""

    ARRIVAL = 0
    STEP_END = 1
    STEP_BEGIN = 2


@dataclass(slots=True)
class Event:
    """A call at a point in time, unless it is cancelled before."""

    call: Callable[[], None] | None

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    """A clock that advances only from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, Kind, int, Event]] = []
        self._num_events = 0

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, call: Callable[[], None], kind: Kind = Kind.ARRIVAL) -> Event:
        """Schedule a call at `time`, which must not be in the past."""
        assert time >= self.now, f"{time} is before {self.now}"
        event = Event(call)
        self._num_events += 1
        heapq.heappush(self._events, (time, kind, self._num_events, event))
        return event

    def call_later(self, seconds: float, call: Callable[[], None]) -> Event:
        """`penstock.frontend.limits.CallLater` in virtual time."""
        return self.at(self.now + seconds, call)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Make the scheduled calls in order of time until none is left or the clock is stopped."""
        while self._events and not is_over():
            time, _, _, event = heapq.heappop(self._events)
            if event.call is not None:
                self.now = time
                event.call()
