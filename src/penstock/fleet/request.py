"""An open request as the fleet sees it: one record, which dispatch, placement, router and crash blame share.

Its owner makes it and hands it to them: none of them keeps requests by id, and each changes only its own fields.
"""

from dataclasses import field

from penstock.api.request import BlockSource, Request
from penstock.dataclass import dataclass


@dataclass(slots=True)
class Case:
    """The evidence of `CrashBlame` on a request."""

    index: int | None = None
    """Its number in its engine's order of requests; None while no engine has it."""
    first_step: int | None = None
    """The step of its first tokens from this engine."""
    is_proven: bool = False
    """Whether it got tokens in two steps of this engine."""
    suspect: bool = False
    faults: int = 0
    deaths: int = 0
    losses: int = 0
    """Lost machines while it was the only suspect."""


@dataclass(slots=True)
class Route:
    """The blocks of a request's prompt, as the router knows them."""

    request: Request
    chains: dict[int, list[int]] = field(default_factory=dict)
    """Keys of its prompt's full blocks, by block size."""
    replica: int | None = None
    """Number of the replica that it was sent to."""
    ticket: int = 0
    touched: list[int] = field(default_factory=list)
    """Ticket of the last request that touched each block that was expected to be cached."""


@dataclass(slots=True, eq=False)
class FleetRequest:
    """An open request, queued or at a replica."""

    request: Request
    account: tuple[str, int] = ("", 0)
    """Tenant and priority, as far as the queue's policy uses them."""
    ordinal: int = -1
    replica: int | None = None
    """Number of the replica that it is at; None while it is queued."""
    has_returned: bool = False
    """Whether it is queued after it left a replica."""
    arithmetic: str | None = None
    """The arithmetic of the engine that computed its first tokens; None before the first output."""
    is_counted: bool = False
    """Whether it is part of its replica's load."""
    is_leaving: bool = False
    """Whether its replica was asked to hand it over."""
    source: BlockSource | None = None
    """Where its last replica left the KV blocks of its tokens."""
    pending: int = 0
    """Its share of the replica's pending prompt tokens."""
    case: Case = field(default_factory=Case)
    """A suspect's case goes with it to its next replica."""
    route: Route | None = None
    """None while the router does not know it: a single replica is chosen without the router."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_sequences(self) -> int:
        return self.request.params.num_sequences

    @property
    def has_begun(self) -> bool:
        """Whether it has had outputs."""
        return self.arithmetic is not None

    @property
    def is_in_engine(self) -> bool:
        """Whether an engine has it: it is neither queued nor waiting at its replica for the next engine."""
        return self.case.index is not None

    def take_source(self) -> BlockSource | None:
        """Where its KV blocks can be read from, now that it is handed over; None the second time."""
        source, self.source = self.source, None
        return source
