"""Crash blame: which requests the engine has, which wait for it, and which are suspected of its death. Pure state.

    add_request ──> waiting ──due──> in the engine: unproven ──tokens in two steps──> proven
                       ▲                     │                                          │
                       └──── died: suspect ──┴────────────── died ─────────────────────┘

    remove_request: from anywhere

When an engine dies, its requests go to the next one. Requests that got tokens in two steps (a prompt and a decode) are
proven: they cannot have killed the engine at once, and are handed over together. The other requests of the fatal step
are suspects: each is handed over only when all others in the engine are proven, and none follows until it is proven
itself. So when the engine dies again, at most one request is under suspicion, and it gets a mark. A marked request is
handed over first to the next engine, and runs alone there until it is proven: it is convicted only by a death that no
other request can have caused.

Losing the engine's machine gives no such mark, but is counted. A suspect may be moved to the engines of another replica
with its case, and is tried there in the same way.
"""

from collections.abc import Sequence

from penstock.fleet.request import FleetRequest

FAULTS = 2
"""Crashes or hangs with a request as the only suspect after which it is convicted."""
DEATHS = 3
"""The same for deaths of any kind: SIGKILL may come from outside, but rarely hits the same request repeatedly."""


class CrashBlame:
    """The requests of a replica, from `add_request` to `remove_request`; the evidence is in each one's `Case`."""

    def __init__(self) -> None:
        self._waiting: dict[FleetRequest, None] = {}  # an ordered set
        self._engine: dict[int, FleetRequest] = {}  # by `Case.index`
        self._num_unproven = 0  # of those in the engine
        self._num_handed_over = 0
        self._trial: FleetRequest | None = None  # the suspect in the engine

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_engine(self) -> int:
        return len(self._engine)

    @property
    def is_trying(self) -> bool:
        """Whether a suspect is in the engine or waits for it, so that new requests would wait behind it."""
        return self._trial is not None or bool(self._waiting)

    def requests(self) -> list[FleetRequest]:
        """All requests of the replica, in the order they came to the fleet."""
        return sorted((*self._waiting, *self._engine.values()), key=lambda request: request.ordinal)

    def add_request(self, request: FleetRequest) -> None:
        """Add an accepted request, or a suspect from another replica with its case."""
        assert request not in self._waiting, f"request {request.request_id!r} waits already"
        assert request.case.index is None, f"request {request.request_id!r} is in an engine"
        self._waiting[request] = None

    def remove_request(self, request: FleetRequest) -> None:
        """Remove a request that ended or moves to another replica."""
        self._waiting.pop(request, None)
        case = request.case
        if case.index is not None:
            del self._engine[case.index]
            self._num_unproven -= not case.is_proven
            case.index = None
        if self._trial is request:
            self._trial = None

    def due(self) -> list[FleetRequest]:
        """The requests to hand over now, in this order; they count as in the engine from now on."""
        due = []
        while self._waiting and self._trial is None:
            request = next(iter(self._waiting))
            case = request.case
            # With a death on its record it must run alone; otherwise it is enough that no other can be to blame.
            if case.suspect and (self._engine if case.deaths else self._num_unproven):
                break
            del self._waiting[request]
            case.index, case.first_step, case.is_proven = self._num_handed_over, None, False
            self._num_handed_over += 1
            self._num_unproven += 1
            self._engine[case.index] = request
            self._trial = request if case.suspect else None
            due.append(request)
        return due

    def progressed(self, request: FleetRequest, step: int) -> None:
        """Record that a request got tokens in a step, numbered by the engine."""
        case = request.case
        if case.index is None or case.is_proven:
            return
        if case.first_step is None:
            case.first_step = step
        elif case.first_step != step:
            case.is_proven = True
            case.suspect, case.faults, case.deaths, case.losses = False, 0, 0, 0
            self._num_unproven -= 1
            if self._trial is request:
                self._trial = None

    def died(self, request_indices: Sequence[int] | None, *, fault: bool, lost: bool = False) -> FleetRequest | None:
        """Record the engine's death: all its requests wait for the next one. Returns the convicted request, if any.

        Args:
            request_indices: indices of the requests in the fatal step; None if there was no step, and then any request
                that is not proven may be to blame.
            fault: whether the engine crashed or hung, rather than being killed from outside.
            lost: whether its machine, or the connection to it, was lost.
        """
        suspects = self._suspects(request_indices)
        convict = None
        if len(suspects) == 1:
            case = suspects[0].case
            case.losses += lost
            case.deaths += not lost
            # SIGKILL may come from outside, so a kill counts less than a crash.
            case.faults += fault
            if case.faults >= FAULTS or case.deaths + case.losses >= DEATHS:
                convict = suspects[0]
        for request in suspects:
            request.case.suspect = True
        self._requeue_all()
        if convict is not None:
            self.remove_request(convict)
        return convict

    def _suspects(self, request_indices: Sequence[int] | None) -> list[FleetRequest]:
        """The requests that may have killed the engine; some of the fatal step may have ended meanwhile."""
        unproven = [request for request in self._engine.values() if not request.case.is_proven]
        if request_indices is None:
            return unproven
        return [request for request in unproven if request.case.index in request_indices]

    def _requeue_all(self) -> None:
        """Let the engine's requests wait for the next one: marked suspects first, and then the cleared requests."""
        in_engine = list(self._engine.values())
        marked = [request for request in in_engine if request.case.suspect and request.case.deaths]
        cleared = [request for request in in_engine if not request.case.suspect]
        doubted = [request for request in in_engine if request.case.suspect and not request.case.deaths]
        self._waiting = dict.fromkeys((*marked, *cleared, *doubted, *self._waiting))
        for request in in_engine:
            request.case.index = None
        self._engine = {}
        # The next engine numbers its requests from 0 again.
        self._num_unproven = self._num_handed_over = 0
        self._trial = None

    def waiting(self, *, with_suspects: bool) -> list[FleetRequest]:
        """Requests that wait for the engine, in order."""
        return [request for request in self._waiting if with_suspects or not request.case.suspect]
