"""The memory of a server that serves several models: which are loaded, which are unloaded for others.

    ask ──> in use, or waiting ──next──> Moves: load one, unload some ──loaded, unloaded, failed──> ...

A model is unloaded when its keep-alive time has passed without a use, or when another needs its memory: the least
recently used first, and never while it is in use. Models wait for memory in order. If all loaded models are in use, the
least recently used one gets no new uses until it has been unloaded, so that no model waits forever; requests for it
wait for its next load.
Pure: no I/O and no clock.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal

from penstock.config.engine_config import EngineConfig
from penstock.dataclass import dataclass

FIXED_ENGINES = "with several models the engines of each are those of --engines, for which their memory is planned"
ModelState = Literal["unloaded", "loading", "loaded", "unloading"]
PlanModel = Callable[[str, int], tuple[EngineConfig, int]]
"""Plans a model that is added, of a path and the number of other models: its configuration, and the bytes that it
reserves for a load."""
LoadStage = Literal["waiting", "downloading", "starting", "reading weights", "preparing"]
"""What a load is at: it waits for its turn or for memory; the files are downloaded; the engine starts, reads the
weights, and prepares its first step."""


@dataclass(slots=True)
class ModelMemory:
    """One model: its state, memory and users."""

    needed: int
    """Bytes that it reserves for a load."""
    state: ModelState = "unloaded"
    held: int = 0
    """Bytes that it occupies now."""
    num_uses: int = 0
    num_waiting: int = 0
    """Uses that wait until it is loaded."""
    last_used: float = 0.0
    keep_alive: float = math.inf
    """Seconds without use after which it is unloaded."""
    is_leaving: bool = False
    """Whether another model waits for its room."""
    is_retired: bool = False
    """Whether it was removed or replaced: it is unloaded after its uses."""

    @property
    def is_idle(self) -> bool:
        return self.state == "loaded" and not self.num_uses and not self.num_waiting

    @property
    def expires_at(self) -> float:
        """When it is unloaded unless it is used before."""
        return self.last_used + self.keep_alive


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """State of a model, as shown to clients; by default of one that stays loaded."""

    state: ModelState = "loaded"
    progress: float = 1.0
    """Share of the weights that have been read, 0 to 1."""
    stage: LoadStage | None = None
    """Stage of its load; None: it is not being loaded."""
    error: str | None = None
    """Why it could not be loaded last time, or its engines ended for good."""
    expires_in: float = math.inf
    """Seconds until it is unloaded if it is not used."""
    num_bytes: int = 0
    """Bytes that it occupies; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What is to be done now; the broker's states have changed already."""

    unload: tuple[str, ...] = ()
    load: str | None = None


class ModelBroker:
    """The models of a server in one budget of memory."""

    def __init__(self, total: int, max_loaded: int, keep_alive: float) -> None:
        """
        Args:
            total: bytes of all loaded models together.
            max_loaded: maximum number of loaded models.
            keep_alive: seconds without use after which a model is unloaded, unless a use sets others.
        """
        self._total = total
        self._max_loaded = max_loaded
        self._keep_alive = keep_alive
        self._wanted: list[str] = []  # in order; those that others make leave are loaded still
        self.models: dict[str, ModelMemory] = {}

    def add_model(self, name: str, needed: int, num_waiting: int = 0) -> None:
        """Add a model that reserves this many bytes for a load, or all if it needs more.

        Args:
            num_waiting: uses that wait for it already, as they did for the model that it replaces.
        """
        self.models[name] = ModelMemory(min(needed, self._total), keep_alive=self._keep_alive, num_waiting=num_waiting)
        if num_waiting:
            self._wanted.append(name)

    def retire(self, name: str, retired_name: str) -> int:
        """Stop serving a model, whose place another may take: it is unloaded after the uses that have begun, under
        another name. Returns the number of uses that waited for it, which are over.
        """
        model = self.models[retired_name] = self.models.pop(name)
        num_waiting, model.num_waiting, model.is_retired = model.num_waiting, 0, True
        if name in self._wanted:
            self._wanted.remove(name)
        return num_waiting

    def forget(self, name: str) -> None:
        """Remove a retired model that is unloaded."""
        model = self.models.pop(name)
        assert model.is_retired, "it is still served"
        assert model.state == "unloaded", "it still has memory"

    # ── uses ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, name: str) -> bool:
        """Begin a use; False: it waits until the model is loaded, and begins in `next` or ends by `withdraw`."""
        model = self.models[name]
        if model.state == "loaded" and not model.is_leaving:
            model.num_uses += 1
            return True
        model.num_waiting += 1
        if name not in self._wanted and model.state != "loading":
            self._wanted.append(name)
        return False

    def withdraw(self, name: str) -> None:
        """End a use that still waits."""
        model = self.models[name]
        model.num_waiting -= 1
        if not model.num_waiting and name in self._wanted:
            self._wanted.remove(name)

    def end_use(self, name: str, now: float) -> None:
        """End a use that has begun."""
        model = self.models[name]
        model.num_uses -= 1
        model.last_used = now

    def keep(self, name: str, seconds: float) -> None:
        """Set the time without use after which a model is unloaded, until then."""
        self.models[name].keep_alive = seconds

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def next(self, now: float) -> Moves:
        """What is to be unloaded and loaded now. Waiting uses of models that are loaded begin."""
        for model in self.models.values():
            model.is_leaving = False
        # Decided anew at each call: what the head of the queue needs may have become free otherwise.
        head = self._head()
        if head is not None:
            for victim in self._victims(self.models[head]):
                victim.is_leaving = True
        for name, model in self.models.items():
            if model.state == "loaded" and not model.is_leaving:
                # It may have waiting uses: of a model that was to leave and now stays.
                model.num_uses, model.num_waiting = model.num_uses + model.num_waiting, 0
                if name in self._wanted:
                    self._wanted.remove(name)
        unload = tuple(name for name, model in self.models.items() if self._is_due(model, now))
        for name in unload:
            self.models[name].state = "unloading"
        load = head if head is not None and self._fits(self.models[head]) else None
        if load is not None:
            self._wanted.remove(load)
            # All that it may need is held while it loads; `loaded` gives the rest back.
            self.models[load].state, self.models[load].held = "loading", self.models[load].needed
        return Moves(unload, load)

    def next_expiry(self) -> float | None:
        """Time at which the next idle model is due to be unloaded; None if none is."""
        times = [model.expires_at for model in self.models.values() if model.is_idle and model.keep_alive < math.inf]
        return min(times, default=None)

    def loaded(self, name: str, num_bytes: int, now: float) -> None:
        """Note that a model is loaded, with a memory plan of so many bytes. The uses that wait for it begin."""
        model = self.models[name]
        model.num_uses, model.num_waiting = model.num_waiting, 0  # before another model can make it leave
        model.state, model.held, model.last_used = "loaded", min(num_bytes, model.needed), now

    def lost(self, name: str) -> None:
        """Note that a loaded model's engines end by themselves: uses that have begun are over."""
        self.models[name].state, self.models[name].num_uses = "unloading", 0

    def unloaded(self, name: str) -> None:
        """Note that a model's engines have ended; uses that wait for it wait on."""
        model = self.models[name]
        model.state, model.held, model.keep_alive = "unloaded", 0, self._keep_alive
        if model.num_waiting and name not in self._wanted:
            self._wanted.append(name)

    def failed(self, name: str) -> None:
        """Note that a model could not be loaded: the uses that wait for it are over."""
        self.models[name].num_waiting = 0
        self._wanted = [waiting for waiting in self._wanted if waiting != name]
        self.unloaded(name)

    def _head(self) -> str | None:
        """The model that is loaded next; None: none waits, or one is being loaded."""
        if any(model.state == "loading" for model in self.models.values()):
            return None
        return next((name for name in self._wanted if self.models[name].state in ("unloaded", "unloading")), None)

    def _in_memory(self) -> Iterator[ModelMemory]:
        return (model for model in self.models.values() if model.state != "unloaded")

    def _fits(self, model: ModelMemory) -> bool:
        """Whether a model can be loaded beside all that are in memory."""
        if model.state != "unloaded":
            return False
        others = list(self._in_memory())
        return len(others) < self._max_loaded and sum(other.held for other in others) + model.needed <= self._total

    def _victims(self, model: ModelMemory) -> list[ModelMemory]:
        """Loaded models to unload for another: those in use last, else the least recently used first."""
        # What ends already is as good as gone: others need not make room for the same bytes.
        stay = [other for other in self._in_memory() if other is not model and other.state != "unloading"]
        victims = []
        candidates = sorted((other for other in stay if other.state == "loaded"), key=_by_use)
        for victim in candidates:
            if len(stay) < self._max_loaded and sum(other.held for other in stay) + model.needed <= self._total:
                break
            victims.append(victim)
            stay = [other for other in stay if other is not victim]
        return victims

    def _is_due(self, model: ModelMemory, now: float) -> bool:
        if model.state != "loaded" or model.num_uses:
            return False
        return model.is_leaving or model.is_retired or (not model.num_waiting and now >= model.expires_at)

    def check_integrity(self) -> None:
        """Assert the invariants."""
        in_memory = list(self._in_memory())
        assert sum(model.held for model in in_memory) <= self._total
        assert len(in_memory) <= self._max_loaded
        assert sum(model.state == "loading" for model in in_memory) <= 1
        assert len(set(self._wanted)) == len(self._wanted)
        for name, model in self.models.items():
            assert min(model.num_uses, model.num_waiting) >= 0
            assert model.state != "unloaded" or not model.held
            assert not model.num_uses or model.state == "loaded", "a model in use is loaded"
            if model.num_waiting:
                assert name in self._wanted or model.state == "loading", "who waits will be served"


def reservation(num_bytes: int, total: int, num_models: int, max_loaded: int) -> int:
    """Bytes that a model reserves for its load: an equal share, or more if its weights need it.

    Args:
        num_bytes: size of its files; a quarter is added for its KV cache and workspace.
    """
    return max(num_bytes + num_bytes // 4, total // min(num_models, max_loaded))


def _by_use(model: ModelMemory) -> tuple[bool, float]:
    return model.num_uses > 0, model.last_used
