"""A queue with round-robin between tenants; each tenant's items are ordered by rank."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Waiting items; ties in rank are first come, first served."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[str, dict[T, float]] = OrderedDict()  # the tenants in their turns
        self._tenants: dict[T, str] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._tenants)

    def add(self, tenant: str, item: T, rank: float = 0.0) -> None:
        """Add an item to its tenant's queue."""
        self._ranks.setdefault(tenant, {})[item] = rank
        self._tenants[item] = tenant

    def first(self) -> T | None:
        """The next item, which stays in the queue."""
        for ranks in self._ranks.values():
            return min(ranks, key=ranks.__getitem__)
        return None

    def take_first(self) -> T | None:
        """Remove and return the next item; its tenant then goes to the end of the round."""
        item = self.first()
        if item is not None:
            self._ranks.move_to_end(self._tenants[item])
            self.remove(item)
        return item

    def remove(self, item: T) -> None:
        """Remove an item; unknown ones are ignored."""
        tenant = self._tenants.pop(item, None)
        if tenant is not None:
            self._ranks[tenant].pop(item)
            if not self._ranks[tenant]:
                self._ranks.pop(tenant)

    def clear(self) -> None:
        """Remove all items."""
        self._ranks.clear()
        self._tenants.clear()
