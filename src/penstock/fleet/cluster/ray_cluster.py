"""Engines on a Ray cluster. Ray places and watches their processes; messages go over ZeroMQ.

    server ── RayLink ──CURVE over TCP───────────────────────────> engine process
                 ├───── Ray: node, exit code ───> EngineHost, an actor in a placement group: the engine's parent
                 └───── Ray: a rank's end ──────> RankHost, one on each further node of the engine: its ranks' parent

Calls to Ray that may take long run in a thread, so that a cluster that does not answer blocks no stream.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from penstock.config.engine_config import EngineConfig
from penstock.dataclass import dataclass
from penstock.engine.protocol import Failed, FromEngine, Launch, Shutdown, ToEngine
from penstock.errors import ConfigError
from penstock.fleet.cluster.host import End, EngineHost, RankHost, order_of, own_version
from penstock.fleet.cluster.secure import SecureListener
from penstock.fleet.link import ENGINE_CORE, with_model, words_of

T = TypeVar("T")

logger = logging.getLogger("penstock.engine")

CONNECTION_CHECK_SECONDS = 0.1
CONNECT_SECONDS = 5.0
LAST_WORDS_SECONDS = 0.5
"""Seconds that an engine whose connection broke may take to exit, and then its parent to report the exit. A lost node
never reports it."""
KILL_SECONDS = 5.0
"""Seconds that a host may take to end its engine; one that does not answer is killed, and the engine with it."""
TOKENS_CHECK_SECONDS = 2.0
"""Seconds between requests to a host for the size of a step that takes long."""
WAITING_SECONDS = 10.0
"""Seconds without a placement after which the log says what the cluster lacks."""
KILLED = -9
HOST_OPTIONS = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}


class RayCluster:
    """A connection to a cluster. `launch` starts engines in it, each with the same resources; `close` ends them."""

    def __init__(
        self, address: str, resources: dict[str, float], host: str | None = None, nodes_per_engine: int = 1
    ) -> None:
        """
        Args:
            address: `auto` for the cluster that this machine is part of, HOST:PORT of the cluster's head, or
                ray://HOST:PORT to reach it from outside.
            resources: resources that each engine reserves on each of its nodes, by Ray's names.
            host: the address of this machine that engines connect to; None: the one that routes to the cluster.

        Raises:
            ConfigError: Ray is not installed, or no such cluster answers.
        """
        self.ray = _import_ray()
        self.resources, self.nodes_per_engine = resources, nodes_per_engine
        try:
            _knock(address)
            self.ray.init(address, namespace="penstock", log_to_driver=False, configure_logging=False)
        except Exception as error:
            raise ConfigError(
                f"no Ray cluster answers at {address}: {str(error).rstrip('.')}. Start one with `ray start --head`, "
                "and name it by the address that this prints"
            ) from error
        # One thread, so that the calls about an engine run in the order in which they were made.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-calls")
        self.listener = SecureListener(host or _own_address(self.ray, address))

    def launch(self, configs: Sequence[EngineConfig], core: str = ENGINE_CORE) -> "list[RayLink]":
        """Start engines wherever the cluster has room; engines for which there is none wait.

        Raises:
            ConfigError: engines could not reach this machine.
        """
        links: list[RayLink] = []
        try:
            links.extend(RayLink(self, self._fit(config), core) for config in configs)
        except BaseException:
            for link in links:
                link.destroy()
            raise
        return links

    def _fit(self, config: EngineConfig) -> EngineConfig:
        """Set an engine's threads and device to the resources reserved for it."""
        threads = config.model.threads or max(1, int(self.resources.get("CPU", 1))) * self.nodes_per_engine
        cache = config.cache
        # Ray reserves memory, but limits nothing: the engine itself has to stay within it.
        if cache.max_memory is None and "memory" in self.resources:
            cache = replace(cache, max_memory=int(self.resources["memory"]) * self.nodes_per_engine)
        return replace(config, model=replace(config.model, threads=threads), cache=cache)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Run a call to Ray that may take long in the thread, after the calls submitted before."""
        return self._thread.submit(call)

    def place(self, launch: Launch) -> "Placed":
        """Reserve an engine's resources and create its hosts once there is room. To be run by `submit`."""
        count, version = self.nodes_per_engine, own_version()
        # An engine on several nodes gets as many different ones: two of its parts on one would share its memory.
        strategy = "STRICT_SPREAD" if count > 1 else "PACK"
        group = self.ray.util.placement_group([self.resources] * count, strategy=strategy)
        host = self._in_bundle(group, 0, EngineHost).remote(
            version, order_of(launch), self.resources.get("CPU", 0.0), count
        )
        others = tuple(
            self._in_bundle(group, node, RankHost).remote(version, host.rendezvous.remote(), launch.config.model, node)
            for node in range(1, count)
        )
        return Placed(group, host, others)

    def _in_bundle(self, group: Any, index: int, actor: type) -> Any:
        """Options of an actor that runs in a bundle of a placement group."""
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
        return self.ray.remote(actor).options(
            num_cpus=self.resources.get("CPU", 0.0),
            num_gpus=self.resources.get("GPU", 0.0),
            memory=self.resources.get("memory"),
            resources={name: count for name, count in self.resources.items() if name not in ("CPU", "GPU", "memory")},
            scheduling_strategy=strategy,
            **HOST_OPTIONS,
        )

    def give_back(self, placed: "Placed") -> None:
        """End an engine's hosts, and with them its processes, and free its resources. To be run by `submit`."""
        for host in (placed.host, *placed.others):
            self.ray.kill(host)
        self.ray.util.remove_placement_group(placed.group)

    def close(self) -> None:
        """Disconnect from the cluster. All links must have been destroyed."""
        with contextlib.suppress(Exception):
            self.submit(self.ray.shutdown).result(timeout=10.0)
        self._thread.shutdown(wait=False)
        self.listener.close()


@dataclass(frozen=True, slots=True)
class Placed:
    """An engine's placement group, and the actors that are its processes' parents."""

    group: Any
    host: Any
    others: tuple[Any, ...]
    """Actors for the engine's ranks on further nodes."""


class RayLink:
    """A link to an engine process in the cluster, which starts as soon as there is room for it."""

    def __init__(self, cluster: RayCluster, config: EngineConfig, core: str) -> None:
        """
        Raises:
            ConfigError: engines could not reach this machine.
        """
        self._cluster, self._config, self._core = cluster, config, core
        self._channel, remote = cluster.listener.listen()
        launch = Launch(config, core, "", remote=remote)
        self._placing = cluster.submit(lambda: cluster.place(launch))
        self._placed, self._gave_up = asyncio.Event(), asyncio.Event()
        self._following: asyncio.Task[int] | None = None
        self._end: End | None = None
        self._why_lost = self._why_killed = ""
        self._is_destroyed = False
        self.in_flight = RemoteStep(self._ask_tokens)
        self.pid = 0
        self.node = ""

    def again(self, model: str | None = None, revision: str | None = None) -> "RayLink":
        """Make a link to a new engine with the same configuration, optionally with another model."""
        return RayLink(self._cluster, with_model(self._config, model, revision), self._core)

    @property
    def was_stopped(self) -> bool:
        return self._end is not None and self._end.was_stopped

    @property
    def was_lost(self) -> bool:
        return bool(self._why_lost)

    async def placed(self) -> None:
        """Wait until the engine is placed on a machine, or has ended."""
        self._follow()
        await self._placed.wait()

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks; messages to a dead engine are lost."""
        self._channel.send(message)

    async def receive(self) -> FromEngine:
        """Wait, without a limit, for the engine's next message."""
        message = await self._channel.receive()
        self.in_flight.heard()
        return message

    async def receive_rest(self) -> list[FromEngine]:
        """Take the messages that are still queued from an engine that has exited."""
        return await self._channel.receive_rest()

    def last_words(self) -> Failed | None:
        """Why an engine that has exited failed, if it left a message, or what happened to its host."""
        words = None if self._end is None else words_of(self._end.last_words)
        reason = self._why_lost or self._why_killed
        return words or (Failed(reason, mistake=False) if reason else None)

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def exited(self) -> int:
        """Wait for the end of the process, its host or its node; returns the exit code, negative for a signal."""
        return await asyncio.shield(self._follow())

    def _follow(self) -> "asyncio.Task[int]":
        if self._following is None:
            self._following = asyncio.ensure_future(self._live())
        return self._following

    async def _live(self) -> int:
        try:
            placed = await asyncio.wrap_future(self._placing)
            self.node, self.pid = await self._warn_if_slow(_result(placed.host.whereabouts.remote()))
            self._placed.set()
            # Whichever comes first: a host that is unreachable can report no end.
            ended, cut = asyncio.ensure_future(_result(placed.host.exited.remote())), asyncio.ensure_future(self._cut())
            others = [asyncio.ensure_future(_result(host.one_ended.remote())) for host in placed.others]
            gave_up = asyncio.ensure_future(self._gave_up.wait())
            try:
                await asyncio.wait({ended, cut, gave_up, *others}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    self._note_lost_rank(others)
                    await asyncio.wait({ended}, timeout=LAST_WORDS_SECONDS)
                    self.kill()  # it cannot serve without its connection and all its ranks
                end: End = await asyncio.wait_for(ended, LAST_WORDS_SECONDS)
            finally:
                for task in (ended, cut, gave_up, *others):
                    task.cancel()
            self._end = self.in_flight.end = end
            return end.code
        except asyncio.TimeoutError:
            silent = "does not answer" if self._gave_up.is_set() else "says nothing, and the connection to it broke"
            self._why_lost = self._why_killed or f"its host on {self.node} {silent}"
        except Exception as error:  # Ray raises many kinds; each means that the host is gone, or was never created
            self._why_lost = f"its host on {self.node or 'no node yet'} is gone: {_shortened(error)}"
        finally:
            self._placed.set()
        return KILLED

    def _note_lost_rank(self, others: "list[asyncio.Task[str]]") -> None:
        """Whether the engine failed, or was ended, because a rank or its node was lost."""
        for lost in (task for task in others if task.done()):
            error = lost.exception()
            self._why_killed = lost.result() if error is None else f"a node of its ranks is gone: {_shortened(error)}"
            logger.error("%s", self._why_killed)

    async def _warn_if_slow(self, work: "Coroutine[Any, Any, Any]") -> Any:
        waiting = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({waiting}, timeout=WAITING_SECONDS)
        if not done:
            count = self._cluster.nodes_per_engine
            nodes = "a node of the cluster that has" if count == 1 else f"{count} nodes of the cluster that each have"
            logger.warning("an engine waits for %s %s free", nodes, self._cluster.resources)
        return await waiting

    async def _cut(self) -> None:
        """Wait until the engine, which was connected, is disconnected."""
        while not self._channel.is_connected:
            await asyncio.sleep(CONNECTION_CHECK_SECONDS)
        while self._channel.is_connected:
            await asyncio.sleep(CONNECTION_CHECK_SECONDS)

    def _ask_tokens(self) -> None:
        """Ask the host for the size of the engine's step; the answer goes to `in_flight`."""
        if self._placed.is_set() and self._following is not None and not self._following.done():
            asked = self._placing.result().host.num_tokens.remote()
            _when_done(asked, lambda done: None if done.exception() else self.in_flight.set_tokens(done.result()))

    # ── its end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """Kill the process."""
        if self._placed.is_set() and self._end is None and not self._why_lost:
            self._placing.result().host.kill.remote()
            asyncio.get_running_loop().call_later(KILL_SECONDS, self._gave_up.set)

    async def close(self, grace: float) -> None:
        """Ask the engine to exit, kill it after `grace` seconds, and free all resources."""
        if self._channel.is_connected:
            self.send(Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.exited(), grace)
        self.destroy()

    def destroy(self) -> None:
        """Kill the process and free all resources; idempotent."""
        self._channel.close()
        if self._following is not None and not self._following.done():
            self._following.cancel()
        if not self._is_destroyed:
            self._is_destroyed = True
            # After the placement, which is in the same queue: an engine that still waits for room is placed, and given
            # back.
            self._cluster.submit(lambda: self._cluster.give_back(self._placing.result()))


class RemoteStep:
    """The current step of a remote engine: known only if it takes long, or after the engine ended."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """
        Args:
            ask: requests the size of the step; the answer is passed to `set_tokens`.
        """
        self._ask = ask
        self._since = time.monotonic()  # when the engine last reported, or was last asked
        self._tokens = 0
        self.end: End | None = None

    def heard(self) -> None:
        """Note that a step is done."""
        self._since, self._tokens = time.monotonic(), 0

    def set_tokens(self, tokens: int) -> None:
        """Note the number of tokens of the current step."""
        self._tokens = tokens

    def num_tokens(self) -> int:
        """Tokens of the current step; 0 if unknown."""
        now = time.monotonic()
        if now - self._since > TOKENS_CHECK_SECONDS:
            self._since = now
            self._ask()
        return self._tokens

    def request_indices(self) -> list[int] | None:
        """Indices of the requests in the step that the engine died in; None if unknown."""
        return None if self.end is None else self.end.request_indices


async def _result(reference: Any) -> Any:
    """Await the result of a call to an actor."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def then(done: "Future[Any]") -> None:
        if answer.done():
            return
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(done.result())

    _when_done(reference, then)
    return await answer


def _when_done(reference: Any, then: "Callable[[Future[Any]], None]") -> None:
    """Call `then` on the event loop once a call to an actor has returned or failed."""
    loop = asyncio.get_running_loop()

    def done(future: "Future[Any]") -> None:  # by one of Ray's threads
        with contextlib.suppress(RuntimeError):  # the loop is closed: the result is not needed
            loop.call_soon_threadsafe(then, future)

    reference.future().add_done_callback(done)


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(f"cluster needs Ray: pip install '.[ray]' in Penstock's source folder ({error})") from None
    return ray


def _knock(address: str) -> None:
    """
    Raises:
        OSError: nothing listens there. Ray itself would take minutes to report it.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def _own_address(ray: Any, address: str) -> str:
    """This machine's address as the cluster sees it."""
    if not address.startswith("ray://"):
        return str(ray.util.get_node_ip_address())
    host, _, port = address.removeprefix("ray://").rpartition(":")
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)  # on a datagram socket this sends nothing
        return str(probe.getsockname()[0])


def _shortened(error: BaseException) -> str:
    """The last line of Ray's message, as the whole is often long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:500]
