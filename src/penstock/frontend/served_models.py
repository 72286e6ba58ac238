"""The models of a server that serves several, each an `AsyncEngine`: loaded when used, unloaded when idle.

    use(name) ──ModelBroker──> start or wake the engine ──ModelUse──> a call's requests ──end──> put to sleep

An engine is made at the first use of its model, and kept: unloading ends its processes only. `ModelBroker` decides.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from penstock.config.engine_config import EngineConfig
from penstock.engine.info import EngineInfo
from penstock.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PenstockError,
    QueueTimeoutError,
)
from penstock.fleet.fleet import Fleet, ReplicaState
from penstock.fleet.model_broker import LoadStage, ModelBroker, ModelStatus, PlanModel
from penstock.frontend.client import AsyncEngine, Beside
from penstock.frontend.history import History
from penstock.frontend.large_work import LargeWork
from penstock.frontend.limits import QueueLimits
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.served_model import ServedModel, identity_of, lacks_files
from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger("penstock.engine")

StartEngine = Callable[[EngineConfig, Beside], Coroutine[Any, Any, AsyncEngine]]
"""Launches the engine processes of a model, and waits until they are ready."""


class ModelUse:
    """One call's use of a loaded model, which stays loaded until the use ends."""

    def __init__(self, models: "ServedModels", model: ServedModel) -> None:
        self._models = models
        self.model = model
        self.engine = model.started()
        model.uses.add(self)

    def keep(self, seconds: float) -> None:
        """Set the time without use after which the model is unloaded."""
        if self in self.model.uses:  # else its engines were lost
            self._models.broker.keep(self.model.name, seconds)

    def end(self) -> None:
        """End the use; requests that outlive the call, as journaled ones may, keep the model loaded until they end."""
        if self in self.model.uses:
            if len(self.model.uses) == 1 and self.engine.fleet.dispatcher.num_sequences:
                self._models.begin(self._end_when_drained())
            else:
                self._end()

    async def _end_when_drained(self) -> None:
        await self.engine.drained()
        if self in self.model.uses:
            self._end()

    def _end(self) -> None:
        self.model.uses.discard(self)
        self._models.broker.end_use(self.model.name, time.monotonic())
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
        *,
        plan: PlanModel | None = None,
        load_timeout: float = math.inf,
    ) -> None:
        """
        Args:
            broker: has all models.
            journal: of all models; closed with them.
            plan: plans models that are added; None: none is.
            load_timeout: seconds without progress after which a load is ended; by default none is.
        """
        self.models = {model.name: model for model in models}
        """By name; also those that are not served any more, by other names, until they are unloaded."""
        self.broker = broker
        self._plan = plan
        self.load_timeout = load_timeout
        self._main: AsyncEngine | None = None
        self._retired = itertools.count(1)
        self.given_up = asyncio.Event()  # never set: a model that fails leaves the others
        self.refusal: PenstockError | None = None
        self._start = start
        self._limits = limits
        self._journal = journal
        self.large_work = LargeWork(holds_lock=True)
        """Parsing, and other work in Python, for all models."""
        self._history = History(models[0].config.scheduler.policy)
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Load the first model, and begin to load those with unfinished requests in the journal.

        Raises:
            ConfigError: the first model cannot be loaded, or the journal not be read; everything is closed.
            EngineDeadError: an engine of the first model ended while it started.
        """
        try:
            await self._read_journal()
            first = self.first
            self.broker.ask(first.name)
            moves = self.broker.next(time.monotonic())
            assert moves.load == first.name
            await self._load(first)
            self.advance()  # its use begins
            if self._journal is not None:
                self._journal.start(first.started().metrics)
        except BaseException:
            await self.close()
            raise
        self._hold(first)
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
            while model.entries and model.name in self.models:
                with contextlib.suppress(QueueTimeoutError):
                    (await self.use(model.name, None)).end()

    # ── changes while serving ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def served(self) -> list[ServedModel]:
        """The models that new calls may use, in order."""
        return [model for name, model in self.models.items() if not self.broker.models[name].is_retired]

    @property
    def first(self) -> ServedModel:
        """The model of calls that name none."""
        return self.served[0]

    def add_model(self, name: str, path: str) -> None:
        """Serve one more model; it is loaded when it is used. If one has this name, the new one takes its place: calls
        that wait for it get the new one, and open requests end with the old one, which is unloaded then.
        """
        assert self._plan is not None, "no models are added to this server"
        old = self.models.get(name)
        config, needed = self._plan(path, len(self.served) - (old is not None))
        new = ServedModel(name, config)
        if old is None:
            self.models[name] = new
            self.broker.add_model(name, needed)
        else:
            new.waiting, old.waiting = old.waiting, []
            num_waiting = self._retire(old, new)
            self.broker.add_model(name, needed, num_waiting)
        logger.info("the model %s is served%s", name, "" if old is None else ", in place of the one of this name")
        self.advance()

    def remove_model(self, name: str) -> None:
        """Stop serving a model: open requests end with it, then it is unloaded.

        Raises:
            InvalidRequestError: it is the only one.
            ModelNotFoundError: there is none of this name.
        """
        model = self.models.get(name)
        if model is None:
            raise ModelNotFoundError(f"the model {name!r} is not served any more", "model")
        if len(self.served) == 1:
            raise InvalidRequestError(f"model: {name!r} is the only one here: stop the server instead", "model")
        self._fail_waiting(model, ModelNotFoundError(f"the model {name!r} is not served any more", "model"))
        self._retire(model, None)
        logger.info("the model %s is not served any more", name)
        self.advance()

    def _retire(self, old: ServedModel, new: ServedModel | None) -> int:
        """Rename a model until it is unloaded; another may take its place. Returns the uses that waited for it."""
        old.drop()
        name, old.name = old.name, f"{old.name} (until its requests have ended, {next(self._retired)})"
        models: dict[str, ServedModel] = {}
        for key, model in self.models.items():
            if model is not old:
                models[key] = model
            elif new is not None:
                models[key] = new
        self.models = models | {old.name: old}
        num_waiting = self.broker.retire(name, old.name)
        if old.engine is not None:
            old.engine.fleet.stop_restarting(f"the model {name} was replaced or removed")
        self._forget_if_unloaded(old)
        return num_waiting

    def _forget_if_unloaded(self, model: ServedModel) -> None:
        """End a model that is not served any more once its engines have ended."""
        memory = self.broker.models[model.name]
        if memory.is_retired and memory.state == "unloaded":
            self.broker.forget(model.name)
            del self.models[model.name]
            if model.engine is not None:
                self._main = model.engine
                closing = asyncio.ensure_future(model.engine.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

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
        for model in self.served:
            memory = self.broker.models[model.name]
            if memory.state == "loaded" and not memory.is_leaving:
                self.broker.ask(model.name)
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

    async def _load(self, model: ServedModel) -> None:
        """Start or wake a model's engines. Raises as `AsyncEngine.start`."""
        began, model.progress, model.is_downloading = time.monotonic(), 0.0, False
        logger.info("the model %s is being loaded", model.name)
        if model.engine is None:
            model.is_downloading = await asyncio.to_thread(lacks_files, model.config)
            model.check_served()
            start = self._start(model.config, self._beside(model))
            model.engine = await model.wait_for_start(start, self.load_timeout)
            model.entries = ()
        else:
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
        self._hold(model)

    def _beside(self, model: ServedModel) -> Beside:
        return Beside(
            self._history, self._numbers, model.on_loading, self._have_requests, self.large_work, model.entries
        )

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
            self._forget_if_unloaded(model)
        self.advance()

    async def _unload(self, model: ServedModel) -> None:
        if model.watch is not None and model.watch is not asyncio.current_task():
            model.watch.cancel()
        await model.started().sleep()
        logger.info("the model %s is unloaded", model.name)
        self.broker.unloaded(model.name)
        self._forget_if_unloaded(model)
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
    def main(self) -> AsyncEngine:
        """The engine that counts failures of calls without a model, and is asked where none is named: of the first
        model that was loaded before, or of the last that was removed.
        """
        found = next((model.engine for model in self.models.values() if model.engine is not None), self._main)
        assert found is not None, "the first model has been loaded"
        return found

    @property
    def by_name(self) -> dict[str, AsyncEngine]:
        """`engines` of served models by their names."""
        return {model.name: model.engine for model in self.served if model.engine is not None}

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
        return self.main.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the first model."""
        return self.main.tokenizer

    def record_failure(self, reason: str) -> None:
        """Count a failed call."""
        self.main.record_failure(reason)

    def record_ignored_field(self, label: str) -> None:
        """Count a field of a call's body that had no effect."""
        self.main.record_ignored_field(label)

    def status(self, name: str) -> ModelStatus:
        """State of a model."""
        memory, model = self.broker.models[name], self.models[name]
        seconds = memory.keep_alive if not memory.is_idle else memory.expires_at - time.monotonic()
        progress = model.progress if memory.state == "loading" else float(memory.state == "loaded")
        stage: LoadStage | None = model.stage if memory.state == "loading" else None
        if memory.num_waiting and stage is None:
            stage = "waiting"
        return ModelStatus(memory.state, progress, stage, model.error, max(0.0, seconds), memory.held)

    def states(self) -> list[ReplicaState]:
        """State of each engine of the models that were loaded before."""
        return [state for engine in self.engines for state in engine.states()]

    async def engine_of_call(self, name: str) -> AsyncEngine:
        """The engine whose model has a journaled call; the first model's if there is none.

        Raises: as `use` and `Journal.find`.
        """
        entries = [] if self._journal is None else await self._journal.find(name)
        for model in list(self.models.values()) if entries else ():  # a copy: others may be added meanwhile
            identity = await asyncio.to_thread(identity_of, model.config)
            if identity == entries[0].record.model and model.name in self.models:
                if model.engine is None:  # its tokenizer is needed
                    (await self.use(model.name, None)).end()
                return model.started()
        return self.main

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
        await asyncio.to_thread(self.large_work.close)
        await asyncio.gather(*self._closing, *(engine.close() for engine in self.engines))
        if self._journal is not None:
            await self._journal.close()
