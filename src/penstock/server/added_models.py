"""What clients add to a running server, written to its file (`checkpoint/added.py`), from which the next one has it."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.checkpoint.added import Added, AddedFile, file_of_address
from penstock.errors import CheckpointError
from penstock.server.config import ServerConfig

logger = logging.getLogger("penstock.server")


def added_file(config: ServerConfig) -> AddedFile | None:
    """The file that the options name; None: nothing is kept."""
    if config.added_models == "auto":
        return file_of_address(config.port, config.uds)
    return None if config.added_models is None else AddedFile(Path(config.added_models).expanduser().absolute())


class AddedModels:
    """Writes each change in the order in which they were made in memory."""

    def __init__(self, file: AddedFile | None) -> None:
        self._file = file
        self.one_at_a_time = asyncio.Lock()
        """Held by calls that create, copy or delete files of models: they look at what is served after one another."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="added-models")

    async def record(self, change: Callable[[Added], Added]) -> None:
        """Write a change, which has been made already; if that fails, it ends with the server, and the log says so."""
        if self._file is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._file.change, change)
        except CheckpointError as error:
            logger.warning("a change of the served models ends with this server: %s", error)

    async def forget(self, name: str) -> bool:
        """Remove a model, name or adapter that is not served, as its files are gone; returns whether there was one."""
        found = []

        def change(added: Added) -> Added:
            if name in (*added.models, *added.names, *added.adapters):
                found.append(name)
            return added.without_model(name).without_name(name)

        await self.record(change)
        return bool(found)
