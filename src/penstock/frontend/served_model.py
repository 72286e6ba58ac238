"""One of several models that a server serves: its engine once it has been used, and the progress of its loads."""

import asyncio
import math
import os
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from penstock.checkpoint.checkpoint import find_on_disk, weights_size
from penstock.config.engine_config import EngineConfig
from penstock.engine.protocol import Loading
from penstock.errors import EngineDeadError, EngineError, PenstockError
from penstock.fleet.model_broker import LoadStage
from penstock.frontend.client import AsyncEngine
from penstock.frontend.recovery.journal_rows import Entry

T = TypeVar("T")


class ServedModel:
    """One model: its name and configuration, and its engine once it has been used."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        """Its key; another once it is not served any more."""
        self.served_name = name
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
        """Whether it was removed or replaced: nobody waits for its load."""
        self.entries: Sequence[Entry] = ()
        """Unfinished requests in the journal, until it is loaded."""
        self.waiting: list[asyncio.Future[ServedModel]] = []
        self.uses: set[object] = set()
        """Calls that use its engine now."""
        self.watch: asyncio.Task[None] | None = None
        """Waits for the end of its engines for good."""

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
    return str(path) if model.hf_overrides is None else f"{path} {model.hf_overrides}"
