"""Loads models when calls use them, and unloads them when they are idle: carries out what `ModelBroker` decides.

    use(name) ──ModelBroker──> start or wake the engine ──ModelUse──> a call's requests ──end──> put to sleep

An engine is made at the first use of its model, and kept: unloading ends its processes only.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from penstock.config.engine_config import EngineConfig
from penstock.errors import EngineError, OverloadedError, PenstockError, QueueTimeoutError
from penstock.fleet.fleet import Fleet
from penstock.fleet.model_broker import ModelBroker
from penstock.frontend.client import AsyncEngine, Beside
from penstock.frontend.history import History
from penstock.frontend.large_work import LargeWork
from penstock.frontend.limits import QueueLimits
from penstock.frontend.served_model import ServedModel, lacks_files

logger = logging.getLogger("penstock.engine")

StartEngine = Callable[[EngineConfig, Beside], Coroutine[Any, Any, AsyncEngine]]
"""Launches the engine processes of a model, and waits until they are ready."""


class ModelUse:
    """One call's use of a loaded model, which stays loaded until the use ends."""

    def __init__(self, loads: "ModelLoads", model: ServedModel) -> None:
        self._loads = loads
        self.model = model
        self.engine = model.started()
        model.uses.add(self)

    def keep(self, seconds: float) -> None:
        """Set the time without use after which the model is unloaded."""
        if self in self.model.uses:  # else its engines were lost
            self._loads.broker.keep(self.model.name, seconds)

    def end(self) -> None:
        """End the use; requests that outlive the call, as journaled ones may, keep the model loaded until they end."""
        if self in self.model.uses:
            if len(self.model.uses) == 1 and self.engine.fleet.dispatcher.num_sequences:
                self._loads.begin(self._end_when_drained())
            else:
                self._end()

    async def _end_when_drained(self) -> None:
        await self.engine.drained()
        if self in self.model.uses:
            self._end()

    def _end(self) -> None:
        self.model.uses.discard(self)
        self._loads.broker.end_use(self.model.name, time.monotonic())
        self._loads.advance()


class ModelLoads:
    """The engines of a server's models: starts, wakes and ends them."""

    def __init__(
        self,
        models: dict[str, ServedModel],
        broker: ModelBroker,
        start: StartEngine,
        limits: QueueLimits,
        load_timeout: float,
        on_unloaded: Callable[[ServedModel], None],
    ) -> None:
        """
        Args:
            models: by name, also those that are not served any more, until they are unloaded.
            broker: has all models.
            load_timeout: seconds without progress after which a load is ended.
            on_unloaded: called when a model was unloaded, or could not be loaded.
        """
        self.models = models
        self.broker = broker
        self.start_engine = start
        self.load_timeout = load_timeout
        self.refusal: PenstockError | None = None
        """Why models are neither loaded nor unloaded any more."""
        self.large_work = LargeWork(holds_lock=True)
        """Parsing, and other work in Python, for all models."""
        self._limits = limits
        self._on_unloaded = on_unloaded
        self._history = History(next(iter(models.values())).config.scheduler.policy)
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def engines(self) -> list[AsyncEngine]:
        """Engines of the models that were loaded before, also of those that are unloaded now."""
        return [model.engine for model in self.models.values() if model.engine is not None]

    @property
    def awake(self) -> list[AsyncEngine]:
        """Engines of the loaded models."""
        return [engine for engine in self.engines if not engine.fleet.is_asleep]

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
            model = await self._wait(model, timeout)
        return ModelUse(self, model)

    async def _wait(self, model: ServedModel, timeout: float | None) -> ServedModel:
        """Wait until a model is loaded, or the one that takes its place meanwhile, which is returned."""
        if len(model.waiting) >= max(1, self._limits.max_queued):
            self.broker.withdraw(model.name)
            raise OverloadedError(f"{len(model.waiting)} calls wait for the model {model.name!r} (max_queued)")
        longest = self._limits.queue_timeout
        seconds = longest if timeout is None else min(timeout, longest)
        loaded: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        model.waiting.append(loaded)
        self.advance()
        try:
            await asyncio.wait({loaded}, timeout=seconds)
            if not loaded.done():
                raise QueueTimeoutError(f"the model {model.name!r} was not loaded within {seconds:g} s")
            return loaded.result()
        except BaseException:
            if not loaded.done():
                model = next(one for one in self.models.values() if loaded in one.waiting)
                model.waiting.remove(loaded)
                self.broker.withdraw(model.name)
            elif loaded.exception() is None:  # loaded while the call was cancelled
                self.broker.end_use(loaded.result().name, time.monotonic())
            self.advance()
            raise

    @contextlib.contextmanager
    def kept_loaded(self) -> Iterator[list[Fleet]]:
        """Context in which the loaded models stay loaded; yields their fleets."""
        uses = []
        for model in self.models.values():
            memory = self.broker.models[model.name]
            if memory.state == "loaded" and not memory.is_leaving and not memory.is_retired:
                self.broker.ask(model.name)
                uses.append(ModelUse(self, model))
        try:
            yield [use.engine.fleet for use in uses]
        finally:
            for use in uses:
                use.end()

    def hold(self, model: ServedModel) -> None:
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
                    loaded.set_result(model)
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

    async def load(self, model: ServedModel) -> None:
        """Start or wake a model's engines. Raises as `AsyncEngine.start`."""
        began, model.progress, model.is_downloading = time.monotonic(), 0.0, False
        logger.info("the model %s is being loaded", model.name)
        if model.engine is None:
            model.is_downloading = await asyncio.to_thread(lacks_files, model.config)
            config = await asyncio.to_thread(model.config_to_load)
            model.check_served()
            start = self.start_engine(config, self._beside(model))
            model.engine = await model.wait_for_start(start, self.load_timeout)
            model.entries = ()
            await model.check_adapters()
        else:
            model.check_served()
            await model.wait_for_start(model.engine.wake(), self.load_timeout)
        model.error = None
        fleet = model.engine.fleet
        num_bytes = sum(replica.info.memory_bytes for replica in fleet.replicas.values())
        self.broker.ask(
            model.name
        )  # the load's own use: who asked for it may have left, but it may have resumed requests
        self.broker.loaded(model.name, num_bytes, time.monotonic())
        logger.info("the model %s is loaded, after %.1f s", model.name, time.monotonic() - began)
        model.watch = self.begin(self._watch(model))
        self.hold(model)

    def _beside(self, model: ServedModel) -> Beside:
        return Beside(
            self._history, self._numbers, model.on_loading, self._have_requests, self.large_work, model.entries
        )

    def _have_requests(self) -> bool:
        return any(engine.fleet.dispatcher.num_sequences for engine in self.awake)

    async def _load_or_fail(self, model: ServedModel) -> None:
        try:
            await self.load(model)
        except Exception as error:
            if not isinstance(error, PenstockError):
                logger.exception("loading the model %s failed", model.name)
            model.error = str(error)
            logger.error("the model %s cannot be loaded: %s", model.name, error)
            self.broker.failed(model.name)
            self.fail_waiting(model, EngineError(f"the model {model.name!r} cannot be loaded: {error}"))
            self._on_unloaded(model)
        self.advance()

    async def _unload(self, model: ServedModel) -> None:
        if model.watch is not None and model.watch is not asyncio.current_task():
            model.watch.cancel()
        await model.started().sleep()
        logger.info("the model %s is unloaded", model.name)
        self.broker.unloaded(model.name)
        self._on_unloaded(model)
        self.advance()

    async def _watch(self, model: ServedModel) -> None:
        """Unload a model whose engines could not be kept alive; its next use starts them again."""
        engine = model.started()
        await engine.given_up.wait()
        model.error = str(engine.refusal)
        model.uses.clear()
        self.broker.lost(model.name)
        await self._unload(model)

    def fail_waiting(self, model: ServedModel, error: PenstockError) -> None:
        waiting, model.waiting = model.waiting, []
        for loaded in waiting:
            loaded.set_exception(error)

    async def end_work(self) -> None:
        """End loads, unloads and other work that was begun."""
        if self._expiry is not None:
            self._expiry.cancel()
        while tasks := [task for task in self._tasks if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.to_thread(self.large_work.close)
