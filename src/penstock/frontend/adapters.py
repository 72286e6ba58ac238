"""The registry of adapters that requests may choose by name."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from penstock.api.request import Adapter
from penstock.engine.info import EngineInfo
from penstock.errors import AdapterError, ConfigError

logger = logging.getLogger("penstock.engine")

MAX_NAMED = 8
"""Maximum adapters listed in an error message."""


class AdapterNames:
    """Adapters by name. Requests that have chosen an adapter keep it after its removal."""

    def __init__(self, info: Callable[[], EngineInfo]) -> None:
        """
        Args:
            info: returns the engine's current facts.
        """
        self._info = info
        self._adapters: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._adapters.values()))

    def __len__(self) -> int:
        return len(self._adapters)

    def find(self, name: str) -> Adapter | None:
        """The adapter with this name; None if there is none."""
        return self._adapters.get(name)

    def describe(self) -> str:
        """The names for messages: the first ones and the number of the rest, or "none"."""
        names = list(self._adapters)
        shown = ", ".join(map(repr, names[:MAX_NAMED])) or "none"
        return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"

    def read(self, name: str, path: str) -> Adapter:
        """Read and check an adapter's files; can be called in any thread.

        Raises:
            AdapterError: the adapter cannot be used.
        """
        info = self._info()
        if info.adaptable is None:
            raise AdapterError(
                "no memory is planned for adapters: set adapter_memory (--adapter-memory) or adapter (--adapter)"
            )
        from penstock.checkpoint.adapters.folder import read_adapter  # here: most starts read none

        adapter = read_adapter(name, path, info.adaptable).adapter
        if adapter.num_elements > info.max_adapter_elements:
            raise AdapterError(
                f"the adapter {name!r} has {adapter.num_elements:,} weights, and memory is planned for "
                f"{info.max_adapter_elements:,}: raise adapter_memory (--adapter-memory)"
            )
        return adapter

    async def add_usable(self, name: str, path: str, model: str, is_wanted: Callable[[], bool]) -> None:
        """Add an adapter of an earlier server or model, unless one has its name; the log says why it cannot be used.

        Args:
            model: the model's name.
            is_wanted: whether it was not removed while its files were read.
        """
        import asyncio  # here: the offline API has no use for it

        try:
            adapter = await asyncio.to_thread(self.read, name, path)
        except (ConfigError, OSError) as error:
            logger.warning("the adapter %s of the model %s is not served: %s", name, model, error)
            return
        if is_wanted():
            self._adapters.setdefault(name, adapter)

    def add(self, adapter: Adapter, *, in_place: bool = False) -> None:
        """Let requests choose an adapter; with `in_place`, instead of the adapter of the same name.

        Raises:
            AdapterError: another adapter has its name.
        """
        known = self._adapters.get(adapter.name)
        if known is not None and known.digest != adapter.digest and not in_place:
            raise AdapterError(f"there is an adapter {adapter.name!r} already: unload it first")
        self._adapters[adapter.name] = adapter

    def copy_adapter(self, source: str, name: str) -> None:
        """Give an adapter one more name."""
        self._adapters[name] = replace(self._adapters[source], name=name)

    def add_listed(self, paths: Mapping[str, str]) -> None:
        """Read and add the adapters of the options.

        Raises:
            AdapterError: an adapter cannot be used.
        """
        for name, path in paths.items():
            self.add(self.read(name, path))

    def remove(self, name: str) -> Adapter | None:
        """Remove an adapter: no further request can choose it. Returns it; None if there is none of this name."""
        return self._adapters.pop(name, None)
