"""Adapters in the ranks other than the first, which say with a step what the first one loads and drops.

A rank reads its own rows of an adapter in a thread, as the first one does at the same time, and waits for it only in
the first step that needs it. One that the first rank cannot read no step has, so its failure is nobody's here.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from penstock.request import Adapter


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """What becomes of an adapter before a step."""

    adapter: Adapter
    is_loaded: bool
    """False: it is dropped."""


class TakesAdapters(Protocol):
    """A runner; see `TorchRunner`."""

    def load_adapter(self, adapter: Adapter) -> None: ...

    def drop_adapter(self, adapter: Adapter) -> None: ...


class FollowedAdapters:
    """Does to a rank's adapters what was done to those of the first rank, in the same order."""

    def __init__(self, runner: TakesAdapters) -> None:
        self._runner = runner
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loading: dict[str, Future[None]] = {}  # by digest

    def follow(self, changes: Sequence[AdapterChange], used: Sequence[Adapter | None]) -> None:
        """Make the changes, and have the adapters that a step uses ready.

        Raises:
            AdapterError: one of those cannot be read here.
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
