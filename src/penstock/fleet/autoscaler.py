"""Autoscaling: decides the number of engines from the fleet's load, and starts and drains engines accordingly.

    every second: Demand ──Autoscaler──> number wanted ──> Fleet.grow, Fleet.retire

If more engines were wanted throughout the last `upscale_delay` seconds, the smallest number wanted then is started. If
fewer were enough throughout the last `downscale_delay` seconds, engines are drained one at a time.
"""

import asyncio
import logging
import time
from collections import deque

from penstock.dataclass import dataclass
from penstock.errors import PenstockError
from penstock.fleet.fleet import Fleet

logger = logging.getLogger("penstock.engine")

CHECK_SECONDS = 1.0
RETRY_SECONDS = 30.0
"""Seconds between a failed start and the next one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A fleet's load and number of engines at one moment."""

    num_engines: int
    """Engines, including those that start or restart, without those that drain."""
    num_starting: int
    """Engines among these that start for the first time."""
    is_behind: bool
    """Whether requests wait because all engines are busy."""
    num_sequences: int
    """Sequences of all requests, queued or in an engine."""
    slots: int
    """Sequences that one engine runs at the same time."""

    @property
    def num_wanted(self) -> int:
        """Estimated number of engines that the load needs."""
        wanted = -(-self.num_sequences // self.slots)
        if not self.is_behind:
            return wanted
        return max(wanted, self.num_engines + (not self.num_starting))  # even if the slots were enough


class Autoscaler:
    """Decides the number of engines from the history of the load."""

    def __init__(self, least: int, most: int, upscale_delay: float, downscale_delay: float) -> None:
        """
        Args:
            upscale_delay, downscale_delay: seconds throughout which more, or fewer, engines must be wanted.
        """
        self._least, self._most = least, most
        self._upscale_delay, self._downscale_delay = upscale_delay, downscale_delay
        self._began: float | None = None
        self._wishes: deque[tuple[float, int]] = deque()

    def decide(self, now: float, demand: Demand) -> int:
        """The number of engines to run. To be called periodically; `now` in seconds."""
        self._began = now if self._began is None else self._began
        self._wishes.append((now, min(self._most, max(self._least, demand.num_wanted))))
        while self._wishes[0][0] < now - max(self._upscale_delay, self._downscale_delay):
            self._wishes.popleft()
        if demand.num_engines < self._least:  # an engine was given up
            return self._least
        more, fewer = min(self._since(now - self._upscale_delay)), max(self._since(now - self._downscale_delay))
        if more > demand.num_engines and now - self._began >= self._upscale_delay:
            return more
        if fewer < demand.num_engines and now - self._began >= self._downscale_delay:
            return demand.num_engines - 1
        return demand.num_engines

    def _since(self, then: float) -> list[int]:
        return [wanted for at, wanted in self._wishes if at >= then]


class FleetScaler:
    """Applies an autoscaler's decisions to a fleet while `run` runs."""

    def __init__(self, fleet: Fleet, autoscaler: Autoscaler) -> None:
        self._fleet = fleet
        self._autoscaler = autoscaler
        self._starting: set[asyncio.Task[None]] = set()
        self._retiring: asyncio.Task[None] | None = None
        self._not_before = 0.0

    async def run(self) -> None:
        """Watch the load and act until cancelled; starts and drains in progress are then cancelled, too."""
        try:
            while True:
                await asyncio.sleep(CHECK_SECONDS)
                if not self._fleet.is_reloading:
                    self.check(time.monotonic())
        finally:
            for task in (*self._starting, self._retiring):
                if task is not None:
                    task.cancel()

    def check(self, now: float) -> None:
        """Start or drain engines as the current demand requires."""
        demand = self.demand()
        wanted = self._autoscaler.decide(now, demand)
        if wanted > demand.num_engines and now >= self._not_before:
            logger.info("%d engines are wanted, and there are %d: starting more", wanted, demand.num_engines)
            for _ in range(wanted - demand.num_engines):
                task = asyncio.ensure_future(self._grow())
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
        elif wanted < demand.num_engines - len(self._starting) and (self._retiring is None or self._retiring.done()):
            self._retiring = asyncio.ensure_future(self._retire(self._idlest()))

    def demand(self) -> Demand:
        """The fleet's load now."""
        fleet = self._fleet
        return Demand(
            num_engines=len(self._lasting()) + len(self._starting),
            num_starting=len(self._starting),
            is_behind=fleet.dispatcher.is_behind,
            num_sequences=fleet.dispatcher.num_sequences,
            slots=max(1, min((replica.info.max_num_seqs for replica in fleet.replicas.values()), default=1)),
        )

    def _lasting(self) -> list[int]:
        """The replicas that are not draining."""
        return [number for number, replica in self._fleet.replicas.items() if not replica.status.is_draining]

    def _idlest(self) -> int:
        """The replica with the fewest requests; of equal ones, the newest."""
        return min(self._lasting(), key=lambda number: (self._fleet.replicas[number].status.num_requests, -number))

    async def _grow(self) -> None:
        try:
            await self._fleet.grow()
        except PenstockError as error:
            self._not_before = time.monotonic() + RETRY_SECONDS
            logger.error("another engine did not start: %s", error)

    async def _retire(self, number: int) -> None:
        try:
            await self._fleet.retire(number)
        except PenstockError as error:
            logger.error("engine %d is kept: %s", number, error)
