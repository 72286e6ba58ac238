"""A replica: an engine and its successors. Detects that the engine died or hangs, and starts another.

    start ──Ready──> up ──exit, signal, stop, no step in time──> down ──back-off, a new process──> up ...
                                                                  └── too many starts failed ──> given up

The owner handles requests: it is called with each message, each death and each new engine.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import Protocol

from penstock.dataclass import dataclass
from penstock.engine.info import EngineInfo
from penstock.engine.protocol import FromEngine, Loading, Ping, Ready, StepOutputs, ToEngine
from penstock.errors import ConfigError, EngineDeadError, PenstockError
from penstock.fleet.link import Link, describe_exit
from penstock.fleet.placement import ReplicaStatus
from penstock.system import loading_progress

logger = logging.getLogger("penstock.engine")

CHECK_SECONDS = 0.5
"""Seconds between checks for hung steps."""
PING_SECONDS = 1.0
"""Seconds within which an idle engine must answer, in `PING_PARTS` parts."""
PING_PARTS = 10
TOKENS_PER_DEADLINE = 256
"""Tokens of a step for which its deadline grows by one `step_deadline`."""
SOUND_SECONDS = 10.0
"""Seconds of uptime after which an engine's death does not count as a failed start; nor does it after a token."""
OUTSIDE = frozenset(-number for number in (SIGKILL, SIGTERM, SIGINT, SIGHUP))
"""Exit codes of a process killed by signals from outside (an operator, the OOM killer), not by a fault of its own."""


@dataclass(frozen=True, slots=True)
class Death:
    """How an engine ended."""

    reason: str
    """Description of the end, for logs and messages."""
    fault: bool
    """Whether it crashed or hung, rather than being killed from outside."""
    request_indices: list[int] | None
    """The requests in the step that it died in, by their index in the order of `Add`; None outside a step."""
    lost: bool = False
    """Whether its machine, or the connection to it, was lost: its last step is unknown, and a restart may take long."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays and attempts when engines fail one after another."""

    first_pause: float = 0.25
    """Seconds before the second restart in a row after failed starts; each further pause is twice as long."""
    longest_pause: float = 30.0
    max_failed_starts: int = 10
    """Failed starts in a row after which the engine is given up."""

    def pause(self, num_failures: int) -> float:
        """Seconds to wait before the next start."""
        return min(self.longest_pause, self.first_pause * 2.0 ** (num_failures - 1))


DEFAULT_RESTARTS = RestartPolicy()


class ReplicaOwner(Protocol):
    """Callbacks of a replica."""

    def on_message(self, replica: "Replica", message: FromEngine) -> None: ...

    def engine_died(self, replica: "Replica", death: Death) -> None: ...

    def replica_stays_down(self, replica: "Replica") -> None:
        """The next engine takes longer to start than expected."""

    def engine_is_up(self, replica: "Replica") -> None: ...

    def engine_given_up(self, replica: "Replica", error: EngineDeadError) -> None: ...


class Replica:
    """An engine and its successors: keeps one engine process running; the first is up already."""

    def __init__(
        self,
        status: ReplicaStatus,
        link: Link,
        info: EngineInfo,
        *,
        step_deadline: float,
        start_seconds: float,
        restarts: RestartPolicy = DEFAULT_RESTARTS,
    ) -> None:
        """
        Args:
            status: the dispatcher's.
            link: the link to the first engine, which is ready.
            step_deadline: seconds without a message after which a busy engine counts as hung; more for large steps.
            start_seconds: seconds that the start of the first engine took.
        """
        self.number = status.number
        self.status = status
        self.info = info
        self._link = link
        self._step_deadline = step_deadline
        self._start_limit = start_limit(start_seconds)
        self._patience = restart_patience(start_seconds)
        self._restarts = restarts
        self._silence = 0.0
        self._heard = asyncio.Event()  # since the first unanswered ping
        self._heard.set()
        self._unanswered_since = 0.0
        self._failures = 0  # failed starts in a row
        self._task: asyncio.Task[None] | None = None
        self._overdue: asyncio.TimerHandle | None = None  # of a restart
        self._closing = False
        self._is_last: str | None = None  # why no engine follows
        self.down: str | None = None
        """Why no engine is up; None while one is."""

    @property
    def pid(self) -> int:
        """Process id of the latest engine."""
        return self._link.pid

    @property
    def node(self) -> str:
        """The machine that the engine runs on; empty for this one."""
        return self._link.node

    def link_again(self, model: str | None, revision: str | None) -> Link:
        """Make a link to an engine beside this one with the same configuration, optionally with another model."""
        return self._link.again(model, revision)

    def stop_restarting(self, reason: str) -> None:
        """Give the engine up if it ends from now on."""
        self._is_last = reason

    @property
    def is_busy(self) -> bool:
        """Whether the engine has requests and so must make steps."""
        return self.status.blame.num_in_engine > 0

    def supervise(self, owner: ReplicaOwner) -> None:
        """Begin supervision; the owner is notified of messages, deaths and restarts."""
        self._task = asyncio.ensure_future(self._run(owner))

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine; lost while no engine is up."""
        if self.down is None:
            self._link.send(message)

    async def health_error(self) -> str | None:
        """What is wrong with the engine: down, hung in a step, or silent when idle; None if it is healthy."""
        if self.down is not None:
            return self.down
        if self.is_busy:
            return self._hang() if self._silence > self._allowed() else None
        answers = await self._answers_ping()
        return self.down or (None if answers else "the idle engine does not answer")

    async def _answers_ping(self) -> bool:
        """Whether the engine answers within `PING_SECONDS`, or is still in a step of requests that have been aborted.

        The wait has several parts, so that a delay of this process costs the engine only one of them.
        """
        if self._heard.is_set():
            self._heard.clear()
            self._unanswered_since = time.monotonic()
        self._link.send(Ping())
        answered = asyncio.ensure_future(self._heard.wait())
        try:
            for _ in range(PING_PARTS):
                await asyncio.wait({answered}, timeout=min(self._step_deadline, PING_SECONDS) / PING_PARTS)
                if answered.done():
                    return True
        finally:
            answered.cancel()
        # The step of aborted requests may still run, though `is_busy` no longer counts them.
        in_step = self._link.in_flight.num_tokens() > 0
        return in_step and time.monotonic() - self._unanswered_since <= self._allowed()

    async def close(self, reason: str = "the server is shutting down") -> None:
        """End the engine process and free all resources."""
        self.down, self._closing = reason, True
        if self._overdue is not None:
            self._overdue.cancel()
        # Again and again: a cancellation that meets the end of an inner `wait_for` is lost (Python 3.11).
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)
        await self._link.close(grace=5.0)

    async def _run(self, owner: ReplicaOwner) -> None:
        try:
            while not self._closing:
                await self._replace(owner, await self._await_death(owner))
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("the engine's supervision failed")
            self.down = str(error)
            logger.critical("%s", error)
            owner.engine_given_up(self, EngineDeadError(str(error)))

    async def _replace(self, owner: ReplicaOwner, death: Death) -> None:
        if self._is_last is not None:
            raise EngineDeadError(f"the engine process {death.reason}, and is not started again: {self._is_last}")
        self.down = f"the engine process {death.reason}; it is being restarted"
        logger.error("the engine process %s; starting another", death.reason)
        owner.engine_died(self, death)  # first: requests can move to other engines while this one restarts
        self._overdue = asyncio.get_running_loop().call_later(self._patience, owner.replica_stays_down, self)
        self._link.destroy()
        # The new engine may have other facts: less memory was free, so longest requests may not fit any more.
        self.info = await self._restart()
        self._overdue.cancel()
        self.down = None
        logger.info("the engine is up again")
        owner.engine_is_up(self)

    # ── death ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _await_death(self, owner: ReplicaOwner) -> Death:
        """Pass messages on until the engine has died, those still queued then included."""
        up_since = time.monotonic()
        reading = asyncio.ensure_future(self._read(owner))
        exited = asyncio.ensure_future(self._link.exited())
        hanging = asyncio.ensure_future(self._await_hang())
        try:
            await asyncio.wait({reading, exited, hanging}, return_when=asyncio.FIRST_COMPLETED)
            hang = None if exited.done() else self._hang()
            self._link.kill()
            code = await exited
            # Only then may the rest be read: two readers of one socket would share its messages at random.
            await _cancel(reading)
            # Outputs sent before the death count: they clear requests of blame, and need not be recomputed.
            for message in await self._link.receive_rest():
                self._receive(owner, message)
        finally:
            for task in (reading, exited, hanging):
                task.cancel()
        # An engine that ran for long started well, whatever ended it: the next start need not wait.
        if time.monotonic() - up_since > SOUND_SECONDS:
            self._failures = 0
        # A hang before all else: the kill that ended it is this process's own.
        if hang is not None:
            return Death(f"hung: {hang}", True, self._link.in_flight.request_indices())
        if self._link.was_stopped:
            return Death("was stopped", False, self._link.in_flight.request_indices())
        failed = self._link.last_words()
        words = "" if failed is None else f": {failed.message}"
        indices = self._link.in_flight.request_indices()
        return Death(describe_exit(code) + words, code not in OUTSIDE, indices, self._link.was_lost)

    async def _read(self, owner: ReplicaOwner) -> None:
        while True:
            self._receive(owner, await self._link.receive())

    def _receive(self, owner: ReplicaOwner, message: FromEngine) -> None:
        self._silence = 0.0
        self._heard.set()
        if isinstance(message, StepOutputs) and message.outputs:
            self._failures = 0  # an engine that generates has started well: its death is no failed start
        owner.on_message(self, message)

    async def _await_hang(self) -> None:
        self._silence = 0.0
        last = time.monotonic()
        while self._silence <= self._allowed():
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            # silence while this process itself was stopped proves nothing
            passed, last = min(now - last, 2 * CHECK_SECONDS), now
            self._silence = self._silence + passed if self.is_busy else 0.0

    def _allowed(self) -> float:
        return self._step_deadline * (1 + self._link.in_flight.num_tokens() / TOKENS_PER_DEADLINE)

    def _hang(self) -> str:
        tokens = self._link.in_flight.num_tokens()
        return f"no step for {self._silence:.1f} s with requests to serve" + (f", {tokens} tokens in it" * bool(tokens))

    # ── birth ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _restart(self) -> EngineInfo:
        """Start a new engine and wait until it is ready, pausing longer after each failure.

        Raises:
            EngineDeadError: too many starts in a row failed.
        """
        for _ in range(self._restarts.max_failed_starts):
            if self._failures:
                await asyncio.sleep(self._restarts.pause(self._failures))
            # Counted before the start, and reset by the first tokens: an engine that dies while it loads counts, too.
            self._failures += 1
            try:
                self._link = self._link.again()
                await self._link.placed()
                return await asyncio.wait_for(await_ready(self._link), self._start_limit)
            except asyncio.TimeoutError:
                reason = f"it was not ready after {self._start_limit:.0f} s"
            except PenstockError as error:
                reason = str(error)
            logger.error("the engine did not start: %s", reason)
            self._link.kill()
            await self._link.exited()  # or `destroy` would block the event loop
            self._link.destroy()
        raise EngineDeadError(f"the engine is gone and cannot be started again: {reason}")


def start_limit(first_start: float) -> float:
    """Seconds that a restart may take, from the seconds of the first start."""
    return max(60.0, 10 * first_start)


def restart_patience(first_start: float) -> float:
    """Seconds after which a restart counts as slow, from the seconds of the first start."""
    return max(10.0, 2 * first_start)


OnLoading = Callable[[Loading], None]
"""Called while a starting engine reads its weights."""


async def await_ready(link: Link, on_loading: OnLoading | None = None) -> EngineInfo:
    """Wait until a starting engine is ready; returns its facts.

    Raises:
        ConfigError: options or checkpoint are wrong.
        EngineDeadError: the engine process ended for another reason.
    """
    ready = asyncio.ensure_future(_receive_ready(link, on_loading))
    exited = asyncio.ensure_future(link.exited())
    try:
        await asyncio.wait({ready, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise _failure(link, exited.result())
        return ready.result().info
    finally:
        await _cancel(ready)
        exited.cancel()


async def _receive_ready(link: Link, on_loading: OnLoading | None) -> Ready:
    """Wait for `Ready`; logs the `Loading` messages that precede it."""
    logged = time.monotonic()
    while isinstance(message := await link.receive(), Loading):
        if on_loading is not None:
            on_loading(message)
        if time.monotonic() - logged >= loading_progress.INTERVAL:
            logged, read, total = time.monotonic(), message.num_bytes >> 20, message.total_bytes >> 20
            logger.info("engine process %d has read %d of %d MiB of weights", link.pid, read, total)
    assert isinstance(message, Ready)
    return message


def _failure(link: Link, exit_code: int) -> PenstockError:
    """Why an engine has exited while it started."""
    failed = link.last_words()
    if failed is None:
        return EngineDeadError(f"the engine process {describe_exit(exit_code)} while it started")
    return ConfigError(failed.message) if failed.mistake else EngineDeadError(failed.message)


async def _cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
