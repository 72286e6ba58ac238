"""What clients add to a running server, written to its file (`checkpoint/added.py`), from which the next one has it."""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.added import Added, AddedFile, file_of_address, list_of
from penstock.checkpoint.created import remove_adapter
from penstock.errors import CheckpointError
from penstock.server.config import ServerConfig

if TYPE_CHECKING:
    from penstock.frontend.client import AsyncEngine
    from penstock.frontend.open_requests import OpenRequests

logger = logging.getLogger("penstock.server")


def added_file(config: ServerConfig) -> AddedFile | None:
    """The file that the options name; None: nothing is kept."""
    if config.added_models == "auto":
        return file_of_address(config.port, config.uds)
    if config.added_models is None:
        return None
    # Without links: a change replaces the file, and its lock is beside it.
    return AddedFile(Path(os.path.realpath(os.path.expanduser(config.added_models))))


class AddedModels:
    """Writes each change in the order in which they were made in memory."""

    def __init__(self, file: AddedFile | None) -> None:
        self._file = file
        self.path = list_of(file)
        """The list, for uploaded adapters."""
        self.one_at_a_time = asyncio.Lock()
        """Held by calls that create, copy or delete files of models: they look at what is served after one another."""
        self._deleting: set[asyncio.Task[None]] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="added-models")

    async def record(self, change: Callable[[Added], Added]) -> None:
        """Write a change, which has been made already; if that fails, it ends with the server, and the log says so."""
        if self._file is None:
            return
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self._write, self._file, change)
        await asyncio.shield(writing)  # a client that leaves cancels its call, and the change has been made

    @staticmethod
    def _write(file: AddedFile, change: Callable[[Added], Added]) -> None:
        try:
            file.change(change)
        except CheckpointError as error:
            logger.warning("a change of the served models ends with this server: %s", error)

    async def delete_files(self, path: str, engine: "AsyncEngine | None") -> None:
        """Delete an adapter's files if they were uploaded: now, or after open requests with them."""
        if engine is None or not engine.open_requests.uses_adapter(path):
            await asyncio.to_thread(remove_adapter, Path(path))
            return
        deleting = asyncio.ensure_future(self._delete_later(path, engine.open_requests))
        self._deleting.add(deleting)
        deleting.add_done_callback(self._deleting.discard)

    @staticmethod
    async def _delete_later(path: str, open_requests: "OpenRequests") -> None:
        while open_requests.uses_adapter(path):
            await open_requests.wait_for_departure()
        await asyncio.to_thread(remove_adapter, Path(path))

    async def forget(self, name: str) -> bool:
        """Remove a model, name or adapter that is not served, as its files are gone; returns whether there was one."""
        found = []

        def change(added: Added) -> Added:
            if name in (*added.models, *added.names, *added.adapters):
                found.append(name)
            return added.without_model(name).without_name(name)

        await self.record(change)
        return bool(found)
