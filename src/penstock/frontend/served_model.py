"""One of several models that a server serves: its engine once it has been used, and the progress of its loads."""

import asyncio
import math
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.api.request import Adapter
from penstock.checkpoint.checkpoint import find_on_disk, open_model, weights_size
from penstock.checkpoint.created import version_of
from penstock.checkpoint.encoder_config import named_task
from penstock.config.engine_config import EngineConfig
from penstock.config.model_facts import BYTES_OF
from penstock.engine.info import identity_of as engine_identity
from penstock.engine.protocol import Loading
from penstock.errors import EngineDeadError, EngineError, PenstockError
from penstock.fleet.model_broker import LoadStage
from penstock.frontend.client import AsyncEngine
from penstock.frontend.model_names import ModelNames
from penstock.frontend.recovery.journal_rows import Entry

_NONE: Mapping[str, str] = MappingProxyType({})

T = TypeVar("T")


class ServedModel:
    """One model: its name and configuration, and its engine once it has been used."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        other_names: Iterable[str] = (),
        adapters: Mapping[str, str] = _NONE,
        *,
        has_own_name: bool = True,
    ) -> None:
        """
        Args:
            adapters: paths of adapters that were added, by name; they are checked by its first load.
            has_own_name: whether clients call it by `name`, too.
        """
        self.name = name
        """Its key; another once it is not served any more."""
        self.served_name = name
        self.names = ModelNames(name, other_names, has_own=has_own_name)
        self._unchecked = dict(adapters)
        self._adapter_memory = 0
        self.config = config
        self.engine: AsyncEngine | None = None
        self.error: str | None = None
        """Why it could not be loaded last time, or its engines ended for good."""
        self.progress = 0.0
        """Share of the weights that have been read while it is loaded, 0 to 1."""
        self.is_downloading = False
        """Whether its load began without its files on this machine."""
        self.progressed = asyncio.Event()
        """Set by each sign of progress of a load, and by its end."""
        self.is_dropped = False
        """Whether it was removed or replaced; requests no longer wait for its load."""
        self.entries: Sequence[Entry] = ()
        """Unfinished requests in the journal, until it is loaded."""
        self.waiting: list[asyncio.Future[ServedModel]] = []
        self.uses: set[object] = set()
        """Calls that use its engine now."""
        self.watch: asyncio.Task[None] | None = None
        """Waits for the end of its engines for good."""

    @property
    def adapters(self) -> list[Adapter]:
        """Its adapters; before its first load, those that were added, without the facts of their files."""
        checked = [] if self.engine is None else list(self.engine.adapters)
        known = {adapter.name for adapter in checked}
        return checked + [Adapter(name, path, "", 0) for name, path in self._unchecked.items() if name not in known]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its names and those of its adapters."""
        return (*self.names.all, *(adapter.name for adapter in self.adapters))

    def has_name(self, name: str) -> bool:
        """Whether the model, or an adapter of it, has this name."""
        is_adapter = self.engine is not None and self.engine.adapters.find(name) is not None
        return name in self.names.all or name in self._unchecked or is_adapter

    def copy_adapter(self, source: str, name: str) -> None:
        """Give an adapter one more name, which nothing has."""
        if source in self._unchecked:
            self._unchecked[name] = self._unchecked[source]
        else:
            self.started().adapters.copy_adapter(source, name)

    def remove_adapter(self, name: str) -> Adapter | None:
        """Remove an adapter. Returns it; None if there is none of this name."""
        found = next((adapter for adapter in self.adapters if adapter.name == name), None)
        self._unchecked.pop(name, None)
        if self.engine is not None:
            self.engine.adapters.remove(name)
        return found

    def take_place_of(self, old: "ServedModel") -> None:
        """Get the names and adapters of the model that this one replaces, and as much memory for adapters."""
        self.names = old.names
        self._unchecked = {adapter.name: adapter.path for adapter in old.adapters}
        self._adapter_memory = old._adapter_memory
        if old.engine is not None and (adaptable := old.engine.info.adaptable) is not None:
            self._adapter_memory = old.engine.info.max_adapter_elements * BYTES_OF[adaptable.dtype]

    def config_to_load(self) -> EngineConfig:
        """The configuration, with memory for the adapters of the model that this one replaced. Reads files."""
        options = self.config.adapters
        if not self._adapter_memory or options.adapter_memory != "auto" or _is_encoder(self.config):
            return self.config
        return replace(self.config, adapters=replace(options, adapter_memory=self._adapter_memory))

    async def check_adapters(self) -> None:
        """Read the adapters that were added before its first load; one that cannot be used is not served."""
        adapters = self.started().adapters
        for name, path in list(self._unchecked.items()):
            await adapters.add_usable(name, path, self.served_name, partial(self._unchecked.__contains__, name))
            self._unchecked.pop(name, None)

    def on_loading(self, message: Loading) -> None:
        """Note the progress of a load."""
        self.progress = message.num_bytes / max(1, message.total_bytes)
        self.is_downloading = False
        self.progressed.set()

    @property
    def stage(self) -> LoadStage:
        """What a load that is under way is at."""
        if not self.progress:
            return "downloading" if self.is_downloading else "starting"
        return "reading weights" if self.progress < 1 else "preparing"

    def started(self) -> AsyncEngine:
        """Its engine, which has been used before."""
        assert self.engine is not None, "the model was never loaded"
        return self.engine

    def drop(self) -> None:
        """End a load that is under way."""
        self.is_dropped = True
        self.progressed.set()

    def check_served(self) -> None:
        """
        Raises:
            EngineError: it is not served any more.
        """
        if self.is_dropped:
            raise EngineError(f"the model {self.served_name} was replaced or removed")

    async def wait_for_start(self, start: Coroutine[Any, Any, T], timeout: float) -> T:
        """Wait for a start of its engines, unless it makes no progress for `timeout` seconds.

        Raises:
            EngineDeadError: it did not; the engines have been ended.
            EngineError: it is not served any more; they have been ended, too.
        """
        starting = asyncio.ensure_future(start)
        try:
            while True:
                self.progressed.clear()
                told = asyncio.ensure_future(self.progressed.wait())
                # A download has time limits of its own.
                seconds = None if self.is_downloading or timeout == math.inf else timeout
                await asyncio.wait({starting, told}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
                if starting.done():
                    return starting.result()
                self.check_served()
                if not self.progressed.is_set():
                    raise EngineDeadError(
                        f"its load made no progress for {timeout:g} s, in the stage {self.stage!r} "
                        f"({self.progress:.0%} of the weights were read); --load-timeout allows more"
                    )
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})


def _is_encoder(config: EngineConfig) -> bool:
    try:
        return named_task(open_model(config.model)) in ("embed", "score")
    except (PenstockError, OSError):  # its load says so
        return False


def lacks_files(config: EngineConfig) -> bool:
    """Whether files of a model have to be downloaded."""
    given = config.model.model
    if given is None or os.path.exists(os.path.expanduser(given)):
        return False
    try:
        path = find_on_disk(config.model.model, config.model.revision)
        return path is None or not weights_size(path)
    except (PenstockError, OSError):
        return True


def identity_of(config: EngineConfig) -> str | None:
    """The identity of a model for the journal, as `EngineInfo.model_identity`; None: it is not found."""
    model = config.model
    try:
        path = find_on_disk(model.model, model.revision)
    except PenstockError:
        return None
    if path is None:
        return None
    return engine_identity(str(path), version_of(path), model.hf_overrides)
