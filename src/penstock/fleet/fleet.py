"""The engines of a server, each with its supervisor. The `Dispatcher` decides which engine has which request.

    OpenRequests ──Add, Finish──> Replica 0: Supervisor ── Link ── engine process
                                  Replica 1: Supervisor ── Link ── engine process ...  grow, retire, reload

A replica is an engine and its successors, which take up its requests when it dies. The owner handles requests: the
fleet calls it with each message, death and new engine, and the number of the replica.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from penstock.api.request import FinishReason
from penstock.config.engine_config import Role
from penstock.engine.info import EngineInfo
from penstock.engine.protocol import Expire, Finish, FromEngine, ToEngine
from penstock.errors import ConfigError, EngineDeadError, InvalidRequestError
from penstock.fleet.dispatch import Dispatcher
from penstock.fleet.link import Link
from penstock.fleet.placement import Capacity
from penstock.fleet.router import ROUTERS
from penstock.fleet.supervisor import (
    DEFAULT_RESTARTS,
    Death,
    RestartPolicy,
    Supervisor,
    await_ready,
    restart_patience,
    start_limit,
)

logger = logging.getLogger("penstock.engine")


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Settings of supervision and routing."""

    step_deadline: float = 30.0
    """Seconds without a step, while there is work, after which an engine counts as hung; more for large steps."""
    restarts: RestartPolicy = DEFAULT_RESTARTS
    router: str = "prefix"


class FleetOwner(Protocol):
    """Callbacks of the fleet."""

    def engine_said(self, replica: int, message: FromEngine) -> None: ...

    def engine_died(self, replica: int, death: Death) -> None: ...

    def replica_stays_down(self, replica: int) -> None:
        """A replica's next engine takes longer to start than expected."""

    def engine_is_up(self, replica: int, info: EngineInfo) -> None:
        """A new engine is up, at a new replica or at a replica whose engine died."""

    def replica_drains(self, replica: int, moved: Sequence[str]) -> None:
        """A replica starts no more requests, and the requests `moved` continue at other replicas."""

    def replica_is_gone(self, replica: int) -> None:
        """A replica was removed; others are left."""

    async def wait_for_departure(self) -> None:
        """Wait until a request has ended or left its replica."""

    def engine_given_up(self, error: EngineDeadError) -> None:
        """The engine of the last replica cannot be restarted."""


class Replica:
    """An engine and its successors; the supervisor's owner."""

    def __init__(self, fleet: "Fleet", number: int, supervisor: Supervisor, info: EngineInfo, patience: float) -> None:
        """
        Args:
            patience: seconds that requests wait for the replica's next engine before they move to other replicas.
        """
        self.number = number
        self._patience = patience
        self._waiting: asyncio.TimerHandle | None = None
        self.supervisor = supervisor
        self.info = info
        self.is_draining = False
        self._fleet = fleet

    @property
    def engine_is_busy(self) -> bool:
        return self._fleet.dispatcher.num_in_engine(self.number) > 0

    def engine_said(self, message: FromEngine) -> None:
        self._fleet.owner.engine_said(self.number, message)

    def engine_died(self, death: Death) -> None:
        self._fleet.owner.engine_died(self.number, death)
        self._waiting = asyncio.get_running_loop().call_later(self._patience, self._stays_down)

    def _stays_down(self) -> None:
        if self._fleet.replicas.get(self.number) is self:
            self._fleet.owner.replica_stays_down(self.number)

    def engine_is_up(self, info: EngineInfo) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self.info = info
        self._fleet.dispatcher.engine_up(self.number, capacity_of(info))
        self._fleet.owner.engine_is_up(self.number, info)

    def engine_given_up(self, error: EngineDeadError) -> None:
        self._fleet.give_up(self, error)


State = Literal["up", "restarting", "draining"]


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
        self._num_replicas = 0
        self.is_reloading = False
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, links: Sequence[Link]) -> None:
        """Wait until all engines are ready, and make a replica for each.

        Raises:
            ConfigError: options or checkpoint are wrong, or the engines have different vocabularies or defaults.
            EngineDeadError: an engine process ended for another reason.
        """
        began = time.monotonic()
        starting = [asyncio.ensure_future(await_ready(link)) for link in links]
        try:
            infos = await asyncio.gather(*starting)
        except BaseException:
            for start in starting:
                start.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        for link, info in zip(links, infos, strict=True):
            _check_alike(infos[0], info)
            self._settle(link, info, time.monotonic() - began)

    def _settle(self, link: Link, info: EngineInfo, seconds: float) -> Replica:
        """Make a replica for a ready engine, whose start took `seconds`."""
        supervisor = Supervisor(link, self._options.step_deadline, start_limit(seconds), self._options.restarts)
        replica = Replica(self, self._num_replicas, supervisor, info, restart_patience(seconds))
        self._num_replicas += 1
        self.replicas[replica.number] = replica
        self.dispatcher.add_replica(replica.number, capacity_of(info))
        return replica

    def supervise(self, owner: FleetOwner) -> None:
        """Keep all engines running from now on, and call the owner with each event."""
        self._owner = owner
        for replica in self.replicas.values():
            replica.supervisor.supervise(replica)

    @property
    def owner(self) -> FleetOwner:
        assert self._owner is not None, "the fleet is not supervised yet"
        return self._owner

    @property
    def down(self) -> str | None:
        """Why no engine is up; None while one is."""
        reasons = [replica.supervisor.down for replica in self.replicas.values()]
        return None if None in reasons else "; ".join(dict.fromkeys(reason for reason in reasons if reason))

    @property
    def info(self) -> EngineInfo:
        """Facts of the newest engine, with the largest limits of all engines."""
        infos = [replica.info for replica in self.replicas.values()]
        return replace(
            infos[-1],
            max_model_len=max(info.max_model_len for info in infos),
            max_num_seqs=max(info.max_num_seqs for info in infos),
        )

    @property
    def max_num_seqs(self) -> int:
        """Sequences that can run at the same time, in all engines together."""
        return sum(replica.info.max_num_seqs for replica in self.replicas.values() if not replica.is_draining)

    def send(self, message: Finish | Expire) -> None:
        """Send a message to the engine that has the request; without one it is not needed, and dropped."""
        number = self.dispatcher.replica_of(message.request_id)
        if number is not None:
            self.send_to(number, message)

    def send_to(self, replica: int, message: ToEngine) -> None:
        """Send a message to the engine of a replica; lost while no engine is up there."""
        self.replicas[replica].supervisor.send(message)

    async def trouble(self) -> str | None:
        """What is wrong with the engines; None if at least one is healthy."""
        reasons = await asyncio.gather(
            *(replica.supervisor.trouble(replica.engine_is_busy) for replica in list(self.replicas.values()))
        )
        if not reasons:
            return "there is no engine any more"
        return None if None in reasons else "; ".join(dict.fromkeys(reason for reason in reasons if reason))

    def states(self) -> list[ReplicaState]:
        """State of each replica, for operators."""
        states = []
        for replica in self.replicas.values():
            down = replica.supervisor.down
            state: State = "restarting" if down else "draining" if replica.is_draining else "up"
            num_requests = self.dispatcher.num_at(replica.number)
            facts = (replica.supervisor.node, replica.supervisor.pid, replica.info.model_path, replica.info.arithmetic)
            states.append(ReplicaState(replica.number, state, down, *facts, num_requests, replica.info.role))
        return states

    async def close(self) -> None:
        """End all engine processes."""
        await asyncio.gather(*(replica.supervisor.close() for replica in self.replicas.values()), *self._closing)

    # ── changes while serving ────────────────────────────────────────────────────────────────────────────────────────

    def give_up(self, replica: Replica, error: EngineDeadError) -> None:
        """Remove a replica whose engine cannot be restarted."""
        if len(self.replicas) == 1:
            self.owner.engine_given_up(error)
            return
        self._end(replica)

    def _end(self, replica: Replica) -> "asyncio.Task[None]":
        """Remove a replica; returns the task that ends its engine, which runs whether it is awaited or not."""
        del self.replicas[replica.number]
        self.dispatcher.remove_replica(replica.number)
        self.owner.replica_is_gone(replica.number)
        closing = asyncio.ensure_future(replica.supervisor.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def grow(self, beside: int | None = None, model: str | None = None, revision: str | None = None) -> Replica:
        """Start one more engine, which takes requests once it is up.

        Args:
            beside: the replica whose seat and options the engine gets; None: the oldest replica.
            model: the model to load; None: that of the replica `beside`, read from disk again.
            revision: of the model's hub repository; None: its main branch or, without `model`, that of the replica.

        Raises:
            ConfigError: the engine cannot be started, or its model has another vocabulary or other defaults.
            EngineDeadError: the engine ended while it started.
        """
        like = self._replica(beside if beside is not None else min(self.replicas))
        began = time.monotonic()
        link = like.supervisor.link_again(model, revision)
        try:
            info = await await_ready(link)
            _check_alike(like.info, info)
        except BaseException:
            await link.close(grace=0.0)
            raise
        replica = self._settle(link, info, time.monotonic() - began)
        replica.supervisor.supervise(replica)
        self.owner.engine_is_up(replica.number, info)
        logger.info("engine %d is up", replica.number)
        return replica

    async def retire(self, number: int) -> None:
        """Drain an engine and end it: its requests continue at other replicas, or end here first.

        Raises:
            InvalidRequestError: there is no such replica, or no other replica.
        """
        replica = self._replica(number)
        if all(other.is_draining for other in self.replicas.values() if other is not replica):
            raise InvalidRequestError(f"engine {number} is the only one: add another first, or stop the server")
        logger.info("engine %d drains", number)
        replica.is_draining = True
        moved = self.dispatcher.drain(number)
        for request_id in moved:
            self.send_to(number, Finish(request_id, None, FinishReason.ABORT))
        self.owner.replica_drains(number, moved)
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
                if number in self.replicas and not self.replicas[number].is_draining:
                    await self.grow(number, model, revision)
                    await self.retire(number)
        finally:
            self.is_reloading = False

    def _replica(self, number: int) -> Replica:
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
