"""Adapters in the ranks other than rank 0, which sends its loads and drops with each step's plan.

A rank reads its own rows of an adapter in a thread, while rank 0 reads its rows, and waits for the thread only in the
first step that uses the adapter. No step uses an adapter that rank 0 failed to read, so failing to read it here, too,
has no effect.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from penstock.api.request import Adapter
from penstock.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An adapter that is loaded or dropped before a step."""

    adapter: Adapter
    is_loaded: bool
    """False: it is dropped."""


class TakesAdapters(Protocol):
    """A runner that holds adapters; see `DeviceRunner`."""

    def load_adapter(self, adapter: Adapter) -> None: ...

    def drop_adapter(self, adapter: Adapter) -> None: ...


class FollowedAdapters:
    """Applies rank 0's changes to this rank's adapters, in the same order."""

    def __init__(self, runner: TakesAdapters) -> None:
        self._runner = runner
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loading: dict[str, Future[None]] = {}  # by digest

    def follow(self, changes: Sequence[AdapterChange], used: Sequence[Adapter | None]) -> None:
        """Apply the changes, and wait for the adapters that the step uses.

        Raises:
            AdapterError: this rank cannot read an adapter that the step uses.
        """
        for change in changes:
            if change.is_loaded:
                loading = self._loader.submit(self._runner.load_adapter, change.adapter)
                self._loading[change.adapter.digest] = loading
            else:
                self._drop(change.adapter)
        for adapter in used:
            if adapter is not None:
                self._loading[adapter.digest].result()

    def _drop(self, adapter: Adapter) -> None:
        loading = self._loading.pop(adapter.digest)
        with contextlib.suppress(Exception):
            loading.result()
        self._runner.drop_adapter(adapter)
