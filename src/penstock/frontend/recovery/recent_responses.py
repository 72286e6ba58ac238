"""A bounded store of recent responses, so that callers can continue a conversation without sending it again.

    A <── B <── C     C continues B: each response holds its own new items and the id of its parent
      └── D

Each tenant has its own responses, ordered by their last use. Using a response uses its ancestors after it, so that a
parent is always used more recently than its children, and leaves are evicted first. Above the bound, the tenant that
holds the most bytes loses its least recently used response. With a journal, responses survive the server.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count
from typing import Protocol

from penstock.dataclass import dataclass
from penstock.frontend.metrics import Metrics

RESPONSE_BYTES = 1024
"""Estimated memory of a response beside its content."""
ITEM_BYTES = 256
"""Estimated memory of an item in the index."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its input, in the format of the dialect that stores them."""

    id: str
    tenant: str
    parent: str | None
    """Id of the response that it continues."""
    item_ids: tuple[str, ...]
    """Ids of the items in its input and output."""
    input: bytes
    """Its own new items, without those of its ancestors."""
    response: bytes

    @property
    def num_bytes(self) -> int:
        """Estimated memory that it takes in the store."""
        return len(self.input) + len(self.response) + RESPONSE_BYTES + ITEM_BYTES * len(self.item_ids)


class ResponseLog(Protocol):
    """Persists the store's changes: the journal."""

    def store_response(self, number: int, response: StoredResponse) -> None: ...

    def forget_response(self, number: int) -> None: ...

    def stored_responses(self) -> list[tuple[int, StoredResponse]]: ...


@dataclass(slots=True)
class _Tenant:
    """One tenant's responses, least recently used first, with their numbers in the log."""

    responses: OrderedDict[str, tuple[int, StoredResponse]]
    holders: dict[str, dict[str, None]]
    """Ids of the responses that contain an item, by the item's id."""
    num_bytes: int = 0


class RecentResponses:
    """The responses of all tenants."""

    def __init__(self, max_bytes: int, metrics: Metrics, log: ResponseLog | None = None) -> None:
        """
        Args:
            max_bytes: bound of the estimated memory; 0: nothing is stored.
            log: its responses are loaded as far as they fit; the others are removed from it.
        """
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._metrics = metrics
        self._log = log
        self._tenants: dict[str, _Tenant] = {}
        logged = [] if log is None else log.stored_responses()
        self._numbers = count(max((number for number, _ in logged), default=-1) + 1)
        for number, response in logged:
            self._insert(number, response)
        self._evict()

    def put(self, response: StoredResponse) -> None:
        """Store a response, unless it is larger than the store, or one of the same id is stored.

        No response can continue itself, by whatever detour.
        """
        lineage = [] if response.parent is None else self._lineage(response.tenant, response.parent)
        continues_itself = any(ancestor.parent == response.id for ancestor in (response, *lineage))
        is_stored = self._find(response.tenant, response.id) is not None
        if is_stored or continues_itself or response.num_bytes > self.max_bytes:
            return
        number = next(self._numbers)
        self._insert(number, response)
        if self._log is not None:
            self._log.store_response(number, response)
        self._evict()

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """A tenant's response; None if it is not stored."""
        found = self._find(tenant, id)
        self.use(tenant, [id])
        return found

    def chain(self, tenant: str, id: str) -> list[StoredResponse] | None:
        """A response after all of its ancestors, oldest first; None if one of them is not stored."""
        lineage = self._lineage(tenant, id)
        if not lineage or lineage[-1].parent is not None:
            return None
        self.use(tenant, [id])
        return lineage[::-1]

    def with_item(self, tenant: str, item_id: str) -> StoredResponse | None:
        """The newest response that contains an item; None if none is stored. The caller says when it is used."""
        held = self._tenants.get(tenant)
        holders = held.holders.get(item_id) if held is not None else None
        return self._find(tenant, next(reversed(holders))) if holders else None

    def use(self, tenant: str, ids: Iterable[str]) -> None:
        """Make responses, as far as they are stored, the most recently used, each before its ancestors."""
        seen: set[str] = set()
        lineages: list[list[str]] = []
        for id in ids:
            lineage, found = [], self._find(tenant, id)
            while found is not None and found.id not in seen:
                lineage.append(found.id)
                seen.add(found.id)
                found = None if found.parent is None else self._find(tenant, found.parent)
            lineages.append(lineage)
        for lineage in reversed(lineages):  # a later one may end at an ancestor in an earlier one
            # Ancestors last: a chain loses its newest response first, and never one in the middle.
            for id in lineage:
                self._tenants[tenant].responses.move_to_end(id)

    def delete(self, tenant: str, id: str) -> bool:
        """Remove a tenant's response; returns whether it was stored. Its descendants cannot be continued any more."""
        if self._find(tenant, id) is None:
            return False
        self._remove(tenant, id)
        return True

    def check_integrity(self) -> None:
        """Check that all counts, indexes and orders agree with the responses."""
        for tenant in self._tenants.values():
            responses = [response for _, response in tenant.responses.values()]
            assert responses, "a tenant without responses is forgotten"
            assert tenant.num_bytes == sum(response.num_bytes for response in responses)
            held = {(item, response.id) for response in responses for item in response.item_ids}
            assert {(item, id) for item, ids in tenant.holders.items() for id in ids} == held
            places = {response.id: place for place, response in enumerate(responses)}
            assert all(places[response.id] < places.get(response.parent or "", len(places)) for response in responses)
        assert self.num_bytes == sum(tenant.num_bytes for tenant in self._tenants.values()) <= self.max_bytes

    def _find(self, tenant: str, id: str) -> StoredResponse | None:
        held = self._tenants.get(tenant)
        return held.responses[id][1] if held is not None and id in held.responses else None

    def _lineage(self, tenant: str, id: str) -> list[StoredResponse]:
        """A response before its ancestors, youngest first, as far as they are stored."""
        lineage: list[StoredResponse] = []
        found = self._find(tenant, id)
        while found is not None:
            lineage.append(found)
            found = None if found.parent is None else self._find(tenant, found.parent)
        return lineage

    def _insert(self, number: int, response: StoredResponse) -> None:
        held = self._tenants.setdefault(response.tenant, _Tenant(OrderedDict(), {}))
        held.responses[response.id] = number, response
        for item in response.item_ids:
            held.holders.setdefault(item, {})[response.id] = None
        held.num_bytes += response.num_bytes
        self.num_bytes += response.num_bytes
        self.use(response.tenant, [response.id])

    def _remove(self, tenant: str, id: str) -> None:
        held = self._tenants[tenant]
        number, response = held.responses.pop(id)
        for item in set(response.item_ids):
            del held.holders[item][id]
            if not held.holders[item]:
                del held.holders[item]
        held.num_bytes -= response.num_bytes
        self.num_bytes -= response.num_bytes
        if not held.responses:
            del self._tenants[tenant]
        if self._log is not None:
            self._log.forget_response(number)
        self._report()

    def _evict(self) -> None:
        while self.num_bytes > self.max_bytes:
            # From the tenant with the most bytes, so that no tenant evicts the responses of others.
            tenant = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._remove(tenant, next(iter(self._tenants[tenant].responses)))
        self._report()

    def _report(self) -> None:
        self._metrics.stored_responses.set(sum(len(tenant.responses) for tenant in self._tenants.values()))
        self._metrics.stored_response_bytes.set(self.num_bytes)
