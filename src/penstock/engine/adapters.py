"""Adapter memory of an engine: adapters are loaded when a request needs them, and evicted to make room.

    need(adapter) ──> None: it is loaded
                 └──> a future: it is being loaded, or waits until others are evicted

If there is no room, the least recently needed adapters are evicted as soon as no request uses them. Requests for an
adapter marked for eviction wait as if it were evicted, so no wait is longer than the requests that had already begun.
All calls but the loading itself come from the engine's thread.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from penstock.api.request import Adapter
from penstock.dataclass import dataclass
from penstock.errors import AdapterError
from penstock.kernels.lora import MAX_SLOTS

logger = logging.getLogger(__name__)


@runtime_checkable
class AdapterRunner(Protocol):
    """A runner that supports adapters."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter for later steps; may be called in any thread.

        Raises:
            AdapterError: it cannot be read, or its content has changed.
        """
        ...

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter's memory; called between steps."""
        ...


@dataclass(slots=True)
class _Resident:
    adapter: Adapter
    loading: "Future[None]"
    leaves: bool = False
    """Marked for eviction as soon as no request uses it."""


class AdapterRoom:
    """Tracks which adapters are in memory, and which wait for room."""

    def __init__(
        self,
        runner: AdapterRunner,
        num_elements: int,
        max_adapters: int = MAX_SLOTS,
    ) -> None:
        """
        Args:
            runner: loads adapters, in a thread, and frees their memory.
            num_elements: maximum total elements of the adapters in memory.
        """
        self._runner = runner
        self._num_elements, self._max_adapters = num_elements, max_adapters
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        """Adapters by digest, the least recently needed first."""
        self._waiting: deque[tuple[Adapter, Future[None]]] = deque()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def waiting(self) -> "list[Future[None]]":
        """Futures of the requests whose adapters wait for room."""
        return [future for _, future in self._waiting]

    @property
    def num_loaded(self) -> int:
        """Adapters in memory, including those being loaded."""
        return len(self._residents)

    def need(self, adapter: Adapter) -> "Future[None] | None":
        """A future that completes when the adapter can be used; None: it can now. Fails with `AdapterError`."""
        self._forget_failed()
        resident = self._residents.get(adapter.digest)
        # One that is to leave is not given to new requests, which might keep it in memory for ever.
        if resident is not None and not resident.leaves:
            self._residents.move_to_end(adapter.digest)
            return None if resident.loading.done() else resident.loading
        for waiting, future in self._waiting:
            if waiting.digest == adapter.digest:
                return future
        future = Future[None]()
        if adapter.num_elements > self._num_elements:
            future.set_exception(
                AdapterError(
                    f"the adapter {adapter.name!r} has {adapter.num_elements:,} weights, and there is memory for "
                    f"{self._num_elements:,}: raise adapter_memory"
                )
            )
            return future
        self._waiting.append((adapter, future))
        return future

    def make_room(self, in_use: Callable[[], set[str]]) -> None:
        """Load waiting adapters in order, as far as there is room.

        Args:
            in_use: the digests of adapters that requests use now.
        """
        self._forget_failed()
        # Asked only if something waits: it looks at every live request.
        used = in_use() if self._waiting else set()
        while self._waiting and self._has_room(self._waiting[0][0], used):
            adapter, future = self._waiting.popleft()
            self._residents[adapter.digest] = _Resident(adapter, future)
            used.add(adapter.digest)  # by the requests that waited for it
            self._loader.submit(self._load_into, adapter, future)

    def _forget_failed(self) -> None:
        """Remove adapters that failed to load, so that they can be tried again."""
        for digest, resident in list(self._residents.items()):
            if resident.loading.done() and resident.loading.exception() is not None:
                del self._residents[digest]

    def _load_into(self, adapter: Adapter, future: "Future[None]") -> None:
        try:
            self._runner.load_adapter(adapter)
        except Exception as error:
            if not isinstance(error, AdapterError):
                logger.exception("loading an adapter failed")
            future.set_exception(error)
        else:
            logger.info("loaded the adapter %s from %s", adapter.name, adapter.path)
            future.set_result(None)

    def _has_room(self, adapter: Adapter, used: set[str]) -> bool:
        """Whether there is room for one more; if not, evict adapters that no request uses."""
        # The sort is stable: those in the same state stay in the order of their last need.
        by_need = sorted(self._residents.values(), key=lambda resident: resident.adapter.digest in used)
        staying = [resident for resident in by_need if not resident.leaves]
        while staying and not self._fits(adapter, staying):
            # Freed once no request uses it, and new ones may not: so the adapter that waits will get its room.
            staying.pop(0).leaves = True
        for resident in by_need:
            if resident.leaves and resident.loading.done() and resident.adapter.digest not in used:
                del self._residents[resident.adapter.digest]
                self._runner.drop_adapter(resident.adapter)
                logger.info("the adapter %s gave way", resident.adapter.name)
        return adapter.digest not in self._residents and self._fits(adapter, list(self._residents.values()))

    def _fits(self, adapter: Adapter, others: list[_Resident]) -> bool:
        elements = sum(resident.adapter.num_elements for resident in others)
        return elements + adapter.num_elements <= self._num_elements and len(others) < self._max_adapters

    def close(self) -> None:
        """Shut the thread pool down without waiting for running work."""
        self._loader.shutdown(wait=False, cancel_futures=True)
