"""The models of a server that serves several, each an `AsyncEngine`: loaded when used, unloaded when idle.

    use(name) ──ModelBroker──> start or wake the engine ──ModelUse──> a call's requests ──end──> put to sleep

An engine is made at the first use of its model, and kept: unloading ends its processes only. `ModelBroker` decides.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from penstock.checkpoint.checkpoint import resolve_path
from penstock.config.engine_config import EngineConfig
from penstock.engine.info import EngineInfo
from penstock.engine.protocol import Loading
from penstock.errors import EngineDeadError, EngineError, OverloadedError, PenstockError, QueueTimeoutError
from penstock.fleet.fleet import Fleet, ReplicaState
from penstock.fleet.model_broker import ModelBroker, ModelStatus
from penstock.frontend.client import AsyncEngine, Beside
from penstock.frontend.history import History
from penstock.frontend.limits import QueueLimits
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import Entry

logger = logging.getLogger("penstock.engine")

StartEngine = Callable[[EngineConfig, Beside], Coroutine[Any, Any, AsyncEngine]]
"""Launches the engine processes of a model, and waits until they are ready."""


class ServedModel:
    """One model: its name and configuration, and its engine once it has been used."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self.config = config
        self.engine: AsyncEngine | None = None
        self.error: str | None = None
        """Why it could not be loaded last time, or its engines ended for good."""
        self.progress = 0.0
        """Share of the weights that have been read while it is loaded, 0 to 1."""
        self.entries: Sequence[Entry] = ()
        """Unfinished requests in the journal, until it is loaded."""
        self.waiting: list[asyncio.Future[None]] = []
        self.uses: set[ModelUse] = set()
        self.watch: asyncio.Task[None] | None = None
        """Waits for the end of its engines for good."""

    def on_loading(self, message: Loading) -> None:
        """Note the progress of a load."""
        self.progress = message.num_bytes / max(1, message.total_bytes)

    def started(self) -> AsyncEngine:
        """Its engine, which has been used before."""
        assert self.engine is not None, "the model was never loaded"
        return self.engine


class ModelUse:
    """One call's use of a loaded model, which stays loaded until the use ends."""

    def __init__(self, models: "ServedModels", model: ServedModel) -> None:
        self._models = models
        self._model = model
        self.engine = model.started()
        model.uses.add(self)

    def keep(self, seconds: float) -> None:
        """Set the time without use after which the model is unloaded."""
        self._models.broker.keep(self._model.name, seconds)

    def end(self) -> None:
        """End the use; requests that outlive the call, as journaled ones may, keep the model loaded until they end."""
        if self in self._model.uses:
            if len(self._model.uses) == 1 and self.engine.fleet.dispatcher.num_sequences:
                self._models.begin(self._end_when_drained())
            else:
                self._end()

    async def _end_when_drained(self) -> None:
        await self.engine.drained()
        if self in self._model.uses:
            self._end()

    def _end(self) -> None:
        self._model.uses.discard(self)
        self._models.broker.end_use(self._model.name, time.monotonic())
        self._models.advance()


class ServedModels:
    """All models of a server. The first is loaded by `open`."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        broker: ModelBroker,
        start: StartEngine,
        limits: QueueLimits,
        journal: Journal | None = None,
    ) -> None:
        """
        Args:
            broker: has all models.
            journal: of all models; closed with them.
        """
        self.models = {model.name: model for model in models}
        self.first = models[0]
        self.broker = broker
        self.given_up = asyncio.Event()  # never set: a model that fails leaves the others
        self.refusal: PenstockError | None = None
        self._start = start
        self._limits = limits
        self._journal = journal
        self._history = History(models[0].config.scheduler.policy)
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Load the first model, and begin to load those with unfinished requests in the journal.

        Raises:
            ConfigError: the first model cannot be loaded, or the journal not be read; everything is closed.
            EngineDeadError: an engine of the first model ended while it started.
        """
        try:
            await self._read_journal()
            self.broker.ask(self.first.name)
            moves = self.broker.next(time.monotonic())
            assert moves.load == self.first.name
            await self._load(self.first)
            self.advance()  # its use begins
            if self._journal is not None:
                self._journal.start(self.first.started().metrics)
        except BaseException:
            await self.close()
            raise
        self._hold(self.first)
        for model in self.models.values():
            if model.entries:
                self.begin(self._resume(model))

    async def _read_journal(self) -> None:
        """Give each model its unfinished requests; the first gets those of models that are not served any more."""
        unfinished = [] if self._journal is None else self._journal.unfinished()
        if not unfinished:
            return
        by_identity: dict[str, ServedModel] = {}
        for model in self.models.values():
            identity = await asyncio.to_thread(identity_of, model.config)
            if identity is not None:
                by_identity.setdefault(identity, model)
        for entry in unfinished:
            model = by_identity.get(entry.record.model, self.first)
            model.entries = [*model.entries, entry]

    async def _resume(self, model: ServedModel) -> None:
        """Load a model to resume its requests in the journal, however long it waits for its turn."""
        with contextlib.suppress(PenstockError):  # logged; the journal has them for the next start
            while model.entries:
                with contextlib.suppress(QueueTimeoutError):
                    (await self.use(model.name, None)).end()

    # ── uses ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def use(self, name: str, timeout: float | None) -> ModelUse:
        """Use a model; waits until it is loaded.

        Args:
            timeout: seconds to wait, at most the server's limit of the queue; None: that limit.

        Raises:
            EngineError: the model could not be loaded.
            OverloadedError: too many calls wait for it.
            QueueTimeoutError: it was not loaded in time.
            ShuttingDownError: the server finishes its open requests and accepts no more.
        """
        model = self.models[name]
        if self.refusal is not None:
            raise self.refusal
        if not self.broker.ask(name):
            await self._wait(model, timeout)
        return ModelUse(self, model)

    async def _wait(self, model: ServedModel, timeout: float | None) -> None:
        if len(model.waiting) >= max(1, self._limits.max_queued):
            self.broker.withdraw(model.name)
            raise OverloadedError(f"{len(model.waiting)} calls wait for the model {model.name!r} (max_queued)")
        longest = self._limits.queue_timeout
        seconds = longest if timeout is None else min(timeout, longest)
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(loaded)
        self.advance()
        try:
            await asyncio.wait({loaded}, timeout=seconds)
            if not loaded.done():
                raise QueueTimeoutError(f"the model {model.name!r} was not loaded within {seconds:g} s")
            loaded.result()
        except BaseException:
            if not loaded.done():
                model.waiting.remove(loaded)
                self.broker.withdraw(model.name)
            elif loaded.exception() is None:  # loaded while the call was cancelled
                self.broker.end_use(model.name, time.monotonic())
            self.advance()
            raise

    @contextlib.contextmanager
    def kept_loaded(self) -> Iterator[list[Fleet]]:
        """Context in which the loaded models stay loaded; yields their fleets."""
        uses = []
        for name, model in self.models.items():
            memory = self.broker.models[name]
            if memory.state == "loaded" and not memory.is_leaving:
                self.broker.ask(name)
                uses.append(ModelUse(self, model))
        try:
            yield [use.engine.fleet for use in uses]
        finally:
            for use in uses:
                use.end()

    def _hold(self, model: ServedModel) -> None:
        """Make a use that the broker has begun end with the requests that the model resumed."""
        ModelUse(self, model).end()

    # ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run some work until the server ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("work on a model failed", exc_info=error)

    def advance(self) -> None:
        """Carry out the broker's decisions."""
        if self.refusal is not None:
            return
        moves = self.broker.next(time.monotonic())
        for model in self.models.values():
            memory = self.broker.models[model.name]
            if memory.state == "loaded" and not memory.num_waiting:
                for loaded in model.waiting:
                    loaded.set_result(None)
                model.waiting.clear()
        for name in moves.unload:
            self.begin(self._unload(self.models[name]))
        if moves.load is not None:
            self.begin(self._load_or_fail(self.models[moves.load]))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        expiry = self.broker.next_expiry()
        if expiry is not None:
            self._expiry = asyncio.get_running_loop().call_later(max(0.0, expiry - time.monotonic()), self.advance)

    async def _load(self, model: ServedModel) -> None:
        """Start or wake a model's engines. Raises as `AsyncEngine.start`."""
        began, model.progress = time.monotonic(), 0.0
        logger.info("the model %s is being loaded", model.name)
        if model.engine is None:
            beside = Beside(self._history, self._numbers, model.on_loading, self._have_requests, model.entries)
            model.engine = await self._start(model.config, beside)
            model.entries = ()
        else:
            await model.engine.wake()
        model.error = None
        fleet = model.engine.fleet
        num_bytes = sum(replica.info.memory_bytes for replica in fleet.replicas.values())
        self.broker.ask(
            model.name
        )  # the load's own use: who asked for it may have left, but it may have resumed requests
        self.broker.loaded(model.name, num_bytes, time.monotonic())
        logger.info("the model %s is loaded, after %.1f s", model.name, time.monotonic() - began)
        model.watch = self.begin(self._watch(model))
        self._hold(model)

    def _have_requests(self) -> bool:
        return any(engine.fleet.dispatcher.num_sequences for engine in self.awake)

    async def _load_or_fail(self, model: ServedModel) -> None:
        try:
            await self._load(model)
        except Exception as error:
            if not isinstance(error, PenstockError):
                logger.exception("loading the model %s failed", model.name)
            model.error = str(error)
            logger.error("the model %s cannot be loaded: %s", model.name, error)
            self.broker.failed(model.name)
            self._fail_waiting(model, EngineError(f"the model {model.name!r} cannot be loaded: {error}"))
        self.advance()

    async def _unload(self, model: ServedModel) -> None:
        if model.watch is not None and model.watch is not asyncio.current_task():
            model.watch.cancel()
        await model.started().sleep()
        logger.info("the model %s is unloaded", model.name)
        self.broker.unloaded(model.name)
        self.advance()

    async def _watch(self, model: ServedModel) -> None:
        """Unload a model whose engines could not be kept alive; its next use starts them again."""
        engine = model.started()
        await engine.given_up.wait()
        model.error = str(engine.refusal)
        model.uses.clear()
        self.broker.lost(model.name)
        await self._unload(model)

    def _fail_waiting(self, model: ServedModel, error: PenstockError) -> None:
        waiting, model.waiting = model.waiting, []
        for loaded in waiting:
            loaded.set_exception(error)

    # ── what readers see ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def engines(self) -> list[AsyncEngine]:
        """Engines of the models that were loaded before, also of those that are unloaded now."""
        return [model.engine for model in self.models.values() if model.engine is not None]

    @property
    def by_name(self) -> dict[str, AsyncEngine]:
        """`engines` by the models' names."""
        return {model.name: model.engine for model in self.models.values() if model.engine is not None}

    @property
    def pids(self) -> list[int]:
        """Process ids of all engines."""
        return [pid for engine in self.awake for pid in engine.pids]

    @property
    def awake(self) -> list[AsyncEngine]:
        """Engines of the loaded models."""
        return [engine for engine in self.engines if not engine.fleet.is_asleep]

    @property
    def info(self) -> EngineInfo:
        """Facts of the first model."""
        return self.first.started().info

    def status(self, name: str) -> ModelStatus:
        """State of a model."""
        memory, model = self.broker.models[name], self.models[name]
        seconds = memory.keep_alive if not memory.is_idle else memory.expires_at - time.monotonic()
        progress = model.progress if memory.state == "loading" else float(memory.state == "loaded")
        return ModelStatus(memory.state, progress, model.error, max(0.0, seconds), memory.held)

    def states(self) -> list[ReplicaState]:
        """State of each engine of the models that were loaded before."""
        return [state for engine in self.engines for state in engine.states()]

    async def engine_of_call(self, name: str) -> AsyncEngine:
        """The engine whose model has a journaled call; the first model's if there is none.

        Raises: as `use` and `Journal.find`.
        """
        entries = [] if self._journal is None else await self._journal.find(name)
        for model in self.models.values() if entries else ():
            if await asyncio.to_thread(identity_of, model.config) == entries[0].record.model:
                if model.engine is None:  # its tokenizer is needed
                    (await self.use(model.name, None)).end()
                return model.started()
        return self.first.started()

    @property
    def restarting(self) -> bool:
        """Whether a model is loaded, and all that are have no engine up while one is being started."""
        return bool(self.awake) and all(engine.restarting for engine in self.awake)

    @property
    def journal_error(self) -> str | None:
        """Why the journal cannot take requests now; None if it can, or if there is none."""
        return next((error for engine in self.engines if (error := engine.journal_error) is not None), None)

    async def health_error(self) -> str | None:
        """What is wrong with the engines; None if those of one loaded model are healthy, or none is needed."""
        reasons = await asyncio.gather(*(engine.health_error() for engine in self.awake))
        return None if None in reasons or not reasons else "; ".join(dict.fromkeys(filter(None, reasons)))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def refuse(self, reason: PenstockError) -> None:
        """Refuse new requests from now on, for this reason, and those that wait for a model; open ones continue."""
        self.refusal = reason
        for model in self.models.values():
            self._fail_waiting(model, reason)
        for engine in self.engines:
            engine.refuse(reason)

    async def drained(self) -> None:
        """Wait until no request is open. New requests must be refused already."""
        await asyncio.gather(*(engine.drained() for engine in self.engines))

    def abort_all(self, reason: str) -> None:
        """End every open request with `abort`."""
        for engine in self.engines:
            engine.abort_all(reason)

    def fail_all(self, error: EngineDeadError) -> None:
        """Fail all open requests at once."""
        for engine in self.engines:
            engine.fail_all(error)

    async def close(self) -> None:
        """End all engine processes, and all open requests with an error."""
        if self._expiry is not None:
            self._expiry.cancel()
        while tasks := [task for task in self._tasks if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.gather(*(engine.close() for engine in self.engines))
        if self._journal is not None:
            await self._journal.close()


def identity_of(config: EngineConfig) -> str | None:
    """The identity of a model for the journal, as `EngineInfo.model_identity`; None: it is not found."""
    model = config.model
    try:
        path = str(resolve_path(model.model, model.revision))
    except PenstockError:
        return None
    return path if model.hf_overrides is None else f"{path} {model.hf_overrides}"
