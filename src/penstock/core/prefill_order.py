"""In which order the prompts of several tenants are computed: a step's tokens are shared between them."""

from collections import Counter
from collections.abc import Sequence as Sequences
from collections.abc import Set

from penstock.core.policies import QueuePolicy
from penstock.core.sequence import Sequence


class PrefillOrder:
    """Fair queueing of prompt tokens by a clock a tenant (Goyal, Vin and Cheng, "Start-time Fair Queueing", 1996).

    A tenant's clock counts the prompt tokens that were computed for it. The lowest clock goes first; those that are
    ahead of it by no more than a step's tokens count as equal. Of these the tenant with the fewest running sequences
    goes first, then the one with the fewest tokens to compute: so the prompt of one that asks for little is not cut up.
    A tenant whose prompts begin to be computed starts no lower than the lowest of the others, and keeps its lead.
    """

    def __init__(self, queue: QueuePolicy, step_tokens: int) -> None:
        self._queue = queue
        self._step_tokens = step_tokens
        self._clocks: dict[str, int] = {}
        self._active: set[str] = set()  # tenants with prompts to compute in the latest step

    def sort(self, prompts: list[Sequence], running: Sequences[Sequence]) -> list[Sequence]:
        """The running sequences that lack more than a token, in the order in which a step gives them its tokens."""
        by_tenant: dict[str, list[Sequence]] = {}
        for seq in prompts:
            by_tenant.setdefault(self._queue.tenant(seq), []).append(seq)
        self._begin(by_tenant.keys())
        if len(by_tenant) < 2:
            return prompts
        equal = min(self._clocks[name] for name in by_tenant) + self._step_tokens
        num_running = Counter(map(self._queue.tenant, running))

        def place(name: str) -> tuple[int, int, int]:
            lacking = sum(len(seq.tokens) - seq.num_computed for seq in by_tenant[name])
            return max(self._clocks[name], equal), num_running[name], lacking

        return [seq for name in sorted(by_tenant, key=place) for seq in by_tenant[name]]

    def _begin(self, names: Set[str]) -> None:
        """These tenants have prompts to compute, in this step."""
        lowest = min((self._clocks[name] for name in self._active & names), default=None)
        if lowest is None:  # nobody had to share with any of them: nothing is owed
            self._clocks, lowest = {}, 0
        ahead = {name: clock for name, clock in self._clocks.items() if clock > lowest}
        self._clocks = ahead | {name: max(self._clocks.get(name, 0), lowest) for name in names}
        self._active = set(names)

    def computed(self, seq: Sequence, count: int) -> None:
        """So many tokens of a sequence are computed in the step."""
        name = self._queue.tenant(seq)
        if name in self._clocks:
            self._clocks[name] += count
