"""The adapters that requests may choose, by name."""

from collections.abc import Callable, Iterator, Mapping

from penstock.adapters.folder import read_adapter
from penstock.engine.info import EngineInfo
from penstock.errors import AdapterError
from penstock.request import Adapter

MAX_NAMED = 8
"""Adapters that a message names."""


class AdapterNames:
    """The adapters by name. One that is removed stays in use for the requests that have it."""

    def __init__(self, info: Callable[[], EngineInfo]) -> None:
        """
        Args:
            info: what the engine is now.
        """
        self._info = info
        self._adapters: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._adapters.values()))

    def __len__(self) -> int:
        return len(self._adapters)

    def find(self, name: str) -> Adapter | None:
        """The adapter of a name."""
        return self._adapters.get(name)

    def describe(self) -> str:
        """The names, for messages: some of them and the number of the others, or "none"."""
        names = list(self._adapters)
        shown = ", ".join(map(repr, names[:MAX_NAMED])) or "none"
        return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"

    def read(self, name: str, path: str) -> Adapter:
        """Check an adapter; in any thread, as its files are read.

        Raises:
            AdapterError: it cannot be used.
        """
        info = self._info()
        if info.adaptable is None:
            raise AdapterError("no memory is planned for adapters: start with --adapter-memory, or with --adapter")
        adapter = read_adapter(name, path, info.adaptable).adapter
        if adapter.num_elements > info.max_adapter_elements:
            raise AdapterError(
                f"the adapter {name!r} has {adapter.num_elements:,} weights, and memory is planned for "
                f"{info.max_adapter_elements:,}: raise --adapter-memory"
            )
        return adapter

    def add(self, adapter: Adapter, *, replace: bool = False) -> None:
        """Let requests choose an adapter; with `replace`, instead of another one of its name.

        Raises:
            AdapterError: another one has its name.
        """
        known = self._adapters.get(adapter.name)
        if known is not None and known.digest != adapter.digest and not replace:
            raise AdapterError(f"there is an adapter {adapter.name!r} already: unload it first")
        self._adapters[adapter.name] = adapter

    def add_listed(self, paths: Mapping[str, str]) -> None:
        """Read and add those that the options list.

        Raises:
            AdapterError: one cannot be used.
        """
        for name, path in paths.items():
            self.add(self.read(name, path))

    def remove(self, name: str) -> Adapter | None:
        """Let no further request choose an adapter; None if there is none of this name."""
        return self._adapters.pop(name, None)
