"""Work that waits, by tenant: the tenants take turns, and each has its own work done in the order of its ranks."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Waiting items. Of equal ranks the earlier is first."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[str, dict[T, float]] = OrderedDict()  # the tenants in their turns
        self._tenants: dict[T, str] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._tenants)

    def add(self, tenant: str, item: T, rank: float = 0.0) -> None:
        """Have an item wait."""
        self._ranks.setdefault(tenant, {})[item] = rank
        self._tenants[item] = tenant

    def first(self) -> T | None:
        """The item whose turn is next, which keeps waiting."""
        for ranks in self._ranks.values():
            return min(ranks, key=ranks.__getitem__)
        return None

    def take_first(self) -> T | None:
        """Remove the item whose turn is next; its tenant's next turn comes after those of all others."""
        item = self.first()
        if item is not None:
            self._ranks.move_to_end(self._tenants[item])
            self.remove(item)
        return item

    def remove(self, item: T) -> None:
        """Remove an item that need not wait any more; unknown ones are ignored."""
        tenant = self._tenants.pop(item, None)
        if tenant is not None:
            self._ranks[tenant].pop(item)
            if not self._ranks[tenant]:
                self._ranks.pop(tenant)

    def clear(self) -> None:
        """Remove all."""
        self._ranks.clear()
        self._tenants.clear()
