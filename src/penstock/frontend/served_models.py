"""The models of a server that serves several, each an `AsyncEngine`: added, replaced and removed while it serves.

`ModelLoads` loads them when they are used.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Sequence

from penstock.engine.info import EngineInfo
from penstock.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    PenstockError,
    QueueTimeoutError,
)
from penstock.fleet.fleet import ReplicaState
from penstock.fleet.model_broker import LoadStage, ModelBroker, ModelStatus, PlanModel
from penstock.frontend.client import AsyncEngine
from penstock.frontend.limits import QueueLimits
from penstock.frontend.model_loads import ModelLoads, StartEngine
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.served_model import ServedModel, identity_of
from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger("penstock.engine")


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
        self.loads = ModelLoads(self.models, broker, start, limits, load_timeout, self._forget_if_unloaded)
        self.use, self.kept_loaded, self.large_work = self.loads.use, self.loads.kept_loaded, self.loads.large_work
        self._plan = plan
        self._main: AsyncEngine | None = None
        self._retired = itertools.count(1)
        self.given_up = asyncio.Event()  # never set: a model that fails leaves the others
        self._journal = journal
        self._closing: set[asyncio.Task[None]] = set()

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
            await self.loads.load(first)
            self.loads.advance()  # its use begins
            if self._journal is not None:
                self._journal.start(first.started().metrics)
        except BaseException:
            await self.close()
            raise
        self.loads.hold(first)
        for model in self.models.values():
            if model.entries:
                self.loads.begin(self._resume(model))

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

    def find(self, name: str) -> ServedModel | None:
        """The model that has this name, or an adapter of this name; None if there is none."""
        return next((model for model in self.served if model.has_name(name)), None)

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
            new.take_place_of(old)
            new.waiting, old.waiting = old.waiting, []
            if self.broker.models[name].state == "unloaded":
                new.entries, old.entries = old.entries, ()  # else they are being resumed
            num_waiting = self._retire(old, new)
            self.broker.add_model(name, needed, num_waiting)
        logger.info("the model %s is served%s", name, "" if old is None else ", in place of the one of this name")
        self.loads.advance()
        if new.entries:
            self.loads.begin(self._resume(new))

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
        self.loads.fail_waiting(model, ModelNotFoundError(f"the model {name!r} is not served any more", "model"))
        self._retire(model, None)
        logger.info("the model %s is not served any more", name)
        self.loads.advance()

    def _retire(self, old: ServedModel, new: ServedModel | None) -> int:
        """Rename a model until it is unloaded; another may take its place. Returns the uses that waited for it."""
        old.drop()
        name, old.name = old.name, f"{old.name} (until its requests have ended, {next(self._retired)})"
        models = list(self.models.items())
        self.models.clear()
        for key, model in models:
            if model is not old:
                self.models[key] = model
            elif new is not None:
                self.models[key] = new
        self.models[old.name] = old
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

    # ── what readers see ─────────────────────────────────────────────────────────────────────────────────────────────

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
    def info(self) -> EngineInfo:
        """Facts of the first model."""
        return self.main.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the first model."""
        return self.main.tokenizer

    @property
    def engines(self) -> list[AsyncEngine]:
        """Engines of the models that were loaded before, also of those that are unloaded now."""
        return self.loads.engines

    @property
    def awake(self) -> list[AsyncEngine]:
        """Engines of the loaded models."""
        return self.loads.awake

    @property
    def refusal(self) -> PenstockError | None:
        """Why new requests are refused; None while they are accepted."""
        return self.loads.refusal

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
        self.loads.refusal = reason
        for model in self.models.values():
            self.loads.fail_waiting(model, reason)
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
        await self.loads.end_work()
        await asyncio.gather(*self._closing, *(engine.close() for engine in self.engines))
        if self._journal is not None:
            await self._journal.close()
