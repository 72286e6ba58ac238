"""The replicas of a server: engines and their successors. The `Dispatcher` decides which engine has which request.

    OpenRequests ──Add, Finish──> Replica 0 ── Link ── engine process
                                  Replica 1 ── Link ── engine process ...   grow, retire, reload while serving

A replica is an engine and its successors, which take up its requests when it dies. The owner handles requests: the
fleet calls it with each message, death and new engine, and the replica.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from penstock.api.request import FinishReason
from penstock.config.engine_config import Role
from penstock.dataclass import dataclass
from penstock.engine.info import EngineInfo
from penstock.engine.protocol import Expire, Finish, FromEngine, ToEngine
from penstock.errors import ConfigError, EngineDeadError, InvalidRequestError
from penstock.fleet.dispatch import Dispatcher
from penstock.fleet.link import Link
from penstock.fleet.placement import Capacity, ReplicaStatus
from penstock.fleet.replica import DEFAULT_RESTARTS, Death, OnLoading, Replica, RestartPolicy, await_ready
from penstock.fleet.request import FleetRequest
from penstock.fleet.router import ROUTERS
from penstock.system.host import set_low_priority

logger = logging.getLogger("penstock.engine")

UNLOADED = "the model is unloaded until it is used"
YIELD_SECONDS = 0.5
"""Interval in which a starting engine's priority is adapted to the requests of other models."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Settings of supervision and routing."""

    step_deadline: float = 30.0
    """Seconds without a step, while there is work, after which an engine counts as hung; more for large steps."""
    restarts: RestartPolicy = DEFAULT_RESTARTS
    router: str = "prefix"
    numbers: Iterator[int] | None = None
    """Numbers of new replicas, which the fleets of several models share; None: from 0."""
    on_loading: OnLoading | None = None
    yields: Callable[[], bool] = bool
    """Whether a starting engine leaves most of the cores to others, as another model has requests; by default never."""


class FleetOwner(Protocol):
    """Callbacks of the fleet."""

    def on_message(self, replica: Replica, message: FromEngine) -> None: ...

    def engine_died(self, replica: Replica, death: Death) -> None: ...

    def replica_stays_down(self, replica: Replica) -> None:
        """A replica's next engine takes longer to start than expected."""

    def engine_is_up(self, replica: Replica) -> None:
        """A new engine is up, at a new replica or at a replica whose engine died."""

    def replica_drains(self, num_moved: int) -> None:
        """A replica starts no more requests, and this many continue at other replicas."""

    def replica_is_gone(self, replica: Replica) -> None:
        """A replica was removed, and others are left; or all are unloaded."""

    async def wait_for_departure(self) -> None:
        """Wait until a request has ended or left its replica."""

    def engine_given_up(self, error: EngineDeadError) -> None:
        """The engine of the last replica cannot be restarted."""


State = Literal["up", "restarting", "draining", "unloaded"]


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """State of a replica, as shown to an operator."""

    replica: int
    state: State
    reason: str | None
    node: str
    pid: int
    model: str
    arithmetic: str
    num_requests: int
    role: Role


class Fleet:
    """All replicas of a server."""

    def __init__(self, options: FleetOptions, policy: str) -> None:
        """
        Args:
            policy: the queue's policy, the same as the engines'.
        """
        self.dispatcher = Dispatcher(ROUTERS[options.router](), policy)
        self.replicas: dict[int, Replica] = {}
        self._options = options
        self._owner: FleetOwner | None = None
        self._numbers = options.numbers or itertools.count()
        self.is_reloading = False
        self.is_asleep = False
        """Whether the engines have been ended until `wake`."""
        self._closing: set[asyncio.Task[None]] = set()
        self.on_message: Callable[[Replica, FromEngine], None]
        """The owner's, once the engines are supervised: the fleet has nothing to do for a message."""

    async def open(self, links: Sequence[Link]) -> None:
        """Wait until all engines are ready, and make a replica for each.

        Raises:
            ConfigError: options or checkpoint are wrong, or the engines have different vocabularies or defaults.
            EngineDeadError: an engine process ended for another reason.
        """
        began = time.monotonic()
        infos = await self._all_ready(links)
        for link, info in zip(links, infos, strict=True):
            # Requests move between replicas, so token ids and defaults must mean the same in all.
            _check_alike(infos[0], info)
            self._settle(link, info, time.monotonic() - began)

    async def _all_ready(self, links: Sequence[Link]) -> list[EngineInfo]:
        starting = [asyncio.ensure_future(await_ready(link, self._options.on_loading)) for link in links]
        is_ready = asyncio.Event()
        yielding = asyncio.ensure_future(self._yield_cores([link.pid for link in links], is_ready))
        try:
            infos = await asyncio.gather(*starting)
            is_ready.set()
            await yielding
            return infos
        except BaseException:
            is_ready.set()
            for start in starting:
                start.cancel()
            await asyncio.gather(yielding, *starting, return_exceptions=True)
            raise

    async def _yield_cores(self, pids: Sequence[int], is_ready: asyncio.Event) -> None:
        """Keep starting engines at a low priority while another model has requests."""
        is_low = False
        while True:
            is_done = is_ready.is_set()
            wants_low = not is_done and self._options.yields()
            if wants_low != is_low:
                is_low = wants_low
                await asyncio.to_thread(set_low_priority, pids, is_low=is_low)
            if is_done:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(is_ready.wait(), YIELD_SECONDS)

    def _settle(self, link: Link, info: EngineInfo, seconds: float, status: ReplicaStatus | None = None) -> Replica:
        """Make a replica for a ready engine, whose start took `seconds`, or one with the status that it had before."""
        status = status or self.dispatcher.add_replica(next(self._numbers), capacity_of(info))
        replica = self.replicas[status.number] = Replica(
            status,
            link,
            info,
            step_deadline=self._options.step_deadline,
            start_seconds=seconds,
            restarts=self._options.restarts,
        )
        return replica

    async def sleep(self) -> None:
        """End all engines until `wake`, which starts them again. No request may be open."""
        assert not self.dispatcher.num_sequences, "a model in use is unloaded"
        self.is_asleep = True
        for replica in self.replicas.values():
            self.owner.replica_is_gone(replica)
        await asyncio.gather(*(replica.close(UNLOADED) for replica in self.replicas.values()))

    async def wake(self) -> None:
        """Start the engines that `sleep` ended.

        Raises:
            ConfigError: options or checkpoint are wrong, or the model on disk is another one now.
            EngineDeadError: an engine process ended for another reason.
        """
        began, links = time.monotonic(), list[Link]()
        try:
            for replica in self.replicas.values():
                links.append(replica.link_again(None, None))
            infos = await self._all_ready(links)
            for replica, info in zip(self.replicas.values(), infos, strict=True):
                _check_alike(replica.info, info)
        except BaseException:
            await asyncio.gather(*(link.close(grace=0.0) for link in links))
            raise
        self.is_asleep = False
        # Only now, with all engines ready: a wake that fails leaves every replica asleep.
        for replica, link, info in zip(list(self.replicas.values()), links, infos, strict=True):
            woken = self._settle(link, info, time.monotonic() - began, replica.status)
            woken.supervise(self)
            self.engine_is_up(woken)

    def stop_restarting(self, reason: str) -> None:
        """Do not replace engines that end from now on: the model's files may have changed."""
        for replica in self.replicas.values():
            replica.stop_restarting(reason)

    def supervise(self, owner: FleetOwner) -> None:
        """Keep all engines running from now on, and call the owner with each event."""
        self._owner = owner
        self.on_message = owner.on_message
        for replica in self.replicas.values():
            replica.supervise(self)

    @property
    def owner(self) -> FleetOwner:
        assert self._owner is not None, "the fleet is not supervised yet"
        return self._owner

    @property
    def down(self) -> str | None:
        """Why no engine is up; None while one is, or while none is needed."""
        if self.is_asleep:
            return None
        reasons = [replica.down for replica in self.replicas.values()]
        return None if None in reasons else "; ".join(dict.fromkeys(reason for reason in reasons if reason))

    @property
    def info(self) -> EngineInfo:
        """Facts of the newest engine, with the largest limits of all engines, but room for images as the smallest."""
        infos = [replica.info for replica in self.replicas.values()]
        return replace(
            infos[-1],
            max_model_len=max(info.max_model_len for info in infos),
            max_num_seqs=max(info.max_num_seqs for info in infos),
            image_pixels=min(info.image_pixels for info in infos),  # one engine may get all requests
        )

    @property
    def max_num_seqs(self) -> int:
        """Sequences that can run at the same time, in all engines together."""
        return sum(replica.info.max_num_seqs for replica in self.replicas.values() if not replica.status.is_draining)

    def send(self, entry: FleetRequest, message: Finish | Expire) -> None:
        """Send a message to the engine that has the request; without one it is not needed, and dropped."""
        if entry.replica is not None:
            self.send_to(entry.replica, message)

    def send_to(self, replica: int, message: ToEngine) -> None:
        """Send a message to the engine of a replica; lost while no engine is up there."""
        self.replicas[replica].send(message)

    async def health_error(self) -> str | None:
        """What is wrong with the engines; None if at least one is healthy, or none is needed."""
        if self.is_asleep:
            return None
        reasons = await asyncio.gather(*(replica.health_error() for replica in list(self.replicas.values())))
        if not reasons:
            return "there is no engine any more"
        return None if None in reasons else "; ".join(dict.fromkeys(reason for reason in reasons if reason))

    def states(self) -> list[ReplicaState]:
        """State of each replica, for operators."""
        states = []
        for replica in self.replicas.values():
            info, status = replica.info, replica.status
            state: State = "restarting" if replica.down else "draining" if status.is_draining else "up"
            if self.is_asleep:
                state = "unloaded"
            facts = (replica.node, replica.pid, info.model_path, info.arithmetic, status.num_requests, info.role)
            states.append(ReplicaState(replica.number, state, replica.down, *facts))
        return states

    async def close(self) -> None:
        """End all engine processes."""
        await asyncio.gather(*(replica.close() for replica in self.replicas.values()), *self._closing)

    # ── events of replicas ───────────────────────────────────────────────────────────────────────────────────────────

    def engine_died(self, replica: Replica, death: Death) -> None:
        self.owner.engine_died(replica, death)

    def replica_stays_down(self, replica: Replica) -> None:
        if self.replicas.get(replica.number) is replica:
            self.owner.replica_stays_down(replica)

    def engine_is_up(self, replica: Replica) -> None:
        self.dispatcher.engine_up(replica.number, capacity_of(replica.info))
        self.owner.engine_is_up(replica)

    def engine_given_up(self, replica: Replica, error: EngineDeadError) -> None:
        """Remove a replica whose engine cannot be restarted."""
        if len(self.replicas) == 1:
            self.owner.engine_given_up(error)
            return
        self._end(replica)

    # ── changes while serving ────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, replica: Replica) -> "asyncio.Task[None]":
        """Remove a replica; returns the task that ends its engine, which runs whether it is awaited or not."""
        # Out of the tables first, so that nothing is sent to the engine while it ends.
        del self.replicas[replica.number]
        self.dispatcher.remove_replica(replica.number)
        self.owner.replica_is_gone(replica)
        closing = asyncio.ensure_future(replica.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def grow(self, beside: int | None = None, model: str | None = None, revision: str | None = None) -> Replica:
        """Start one more engine, which takes requests once it is up.

        Args:
            beside: the replica whose binding and options the engine gets; None: the oldest replica.
            model: the model to load; None: that of the replica `beside`, read from disk again.
            revision: of the model's hub repository; None: its main branch or, without `model`, that of the replica.

        Raises:
            ConfigError: the engine cannot be started, or its model has another vocabulary or other defaults.
            EngineDeadError: the engine ended while it started.
        """
        like = self._replica(beside if beside is not None else min(self.replicas))
        began = time.monotonic()
        link = like.link_again(model, revision)
        try:
            info = await await_ready(link)
            _check_alike(like.info, info)
        except BaseException:
            await link.close(grace=0.0)
            raise
        replica = self._settle(link, info, time.monotonic() - began)
        replica.supervise(self)
        self.owner.engine_is_up(replica)
        logger.info("engine %d is up", replica.number)
        return replica

    async def retire(self, number: int) -> None:
        """Drain an engine and end it: its requests continue at other replicas, or end here first.

        Raises:
            InvalidRequestError: there is no such replica, or no other replica.
        """
        replica = self._replica(number)
        if all(other.status.is_draining for other in self.replicas.values() if other is not replica):
            raise InvalidRequestError(f"engine {number} is the only one: add another first, or stop the server")
        logger.info("engine %d drains", number)
        moved = self.dispatcher.drain(number)
        for entry in moved:
            self.send_to(number, Finish(entry.request_id, None, FinishReason.ABORT))
        self.owner.replica_drains(len(moved))
        while number in self.replicas and self.dispatcher.is_needed(number):
            await self.owner.wait_for_departure()
        if number in self.replicas:  # otherwise its engine died meanwhile and could not be restarted
            await asyncio.shield(self._end(replica))
        logger.info("engine %d is drained", number)

    async def reload(self, model: str | None = None, revision: str | None = None) -> None:
        """Replace the engines one by one. No request is lost: requests that have begun end with the old model.

        Args:
            model: the model to load; None: each engine's own, read from disk again.
            revision: see `grow`.

        Raises:
            InvalidRequestError: another reload is under way.
            ConfigError: a new engine cannot be started; engines that were replaced before stay replaced.
            EngineDeadError: a new engine ended while it started.
        """
        if self.is_reloading:
            raise InvalidRequestError("a reload is in progress: try again when it is done")
        self.is_reloading = True
        try:
            for number in list(self.replicas):
                if number in self.replicas and not self.replicas[number].status.is_draining:
                    await self.grow(number, model, revision)
                    await self.retire(number)
        finally:
            self.is_reloading = False

    def _replica(self, number: int) -> Replica:
        if self.is_asleep:
            raise InvalidRequestError("the model is not loaded: its engines start with the next request for it")
        replica = self.replicas.get(number)
        if replica is None:
            known = ", ".join(map(str, self.replicas))
            raise InvalidRequestError(f"there is no engine {number} here; there is: {known}", "place")
        return replica


def capacity_of(info: EngineInfo) -> Capacity:
    """The limits of an engine, for the dispatcher."""
    return Capacity(
        info.num_blocks,
        info.block_size,
        info.max_num_seqs,
        info.max_num_batched_tokens,
        info.max_model_len,
        info.arithmetic,
        info.role,
    )


def _check_alike(first: EngineInfo, other: EngineInfo) -> None:
    """
    Raises:
        ConfigError: the engines have different vocabularies or generation defaults.
    """
    if (first.vocab_size, first.defaults) != (other.vocab_size, other.defaults):
        raise ConfigError(
            f"{other.model_path} has another vocabulary ({other.vocab_size} tokens) or other generation defaults than "
            f"{first.model_path} ({first.vocab_size}): engines of one server must take the same requests; start "
            "another server for it"
        )
