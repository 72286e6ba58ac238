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
from dataclasses import dataclass

FAULTS = 2
"""Crashes or hangs with a request as the only suspect after which it is convicted."""
DEATHS = 3
"""The same for deaths of any kind: SIGKILL may come from outside, but rarely hits the same request repeatedly."""


@dataclass(slots=True)
class Case:
    """The evidence on a request that is not proven."""

    index: int = -1
    first_step: int | None = None
    suspect: bool = False
    faults: int = 0
    deaths: int = 0
    losses: int = 0
    """Lost machines while it was the only suspect."""


class CrashBlame:
    """Requests by id, from `add_request` to `remove_request`; indices follow the order of handover."""

    def __init__(self) -> None:
        self._waiting: dict[str, Case] = {}
        self._engine: dict[str, Case] = {}
        self._unproven: dict[str, Case] = {}  # a subset of the requests in the engine
        self._by_index: dict[int, str] = {}
        self._num_handed_over = 0
        self._trial: str | None = None  # the suspect in the engine

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

    def has_handed_over(self, request_id: str) -> bool:
        """Whether the engine has the request."""
        return request_id in self._engine

    def add_request(self, request_id: str, case: Case | None = None) -> None:
        """Add an accepted request, or a suspect from another replica with its case."""
        assert request_id not in self._waiting, f"request id {request_id!r} waits already"
        assert request_id not in self._engine, f"request id {request_id!r} is in the engine"
        self._waiting[request_id] = case or Case()

    def remove_request(self, request_id: str) -> Case | None:
        """Remove a request that ended or moves to another replica; returns its case, if it is a suspect."""
        case = self._waiting.pop(request_id, None)
        if request_id in self._engine:
            case = self._engine.pop(request_id)
            self._unproven.pop(request_id, None)
            del self._by_index[case.index]
        if self._trial == request_id:
            self._trial = None
        return case if case is not None and case.suspect else None

    def due(self) -> list[str]:
        """The requests to hand over now, in this order; they count as in the engine from now on."""
        due = []
        while self._waiting and self._trial is None:
            request_id, case = next(iter(self._waiting.items()))
            if case.suspect and (self._engine if case.deaths else self._unproven):
                break
            del self._waiting[request_id]
            case.index, case.first_step = self._num_handed_over, None
            self._num_handed_over += 1
            self._by_index[case.index] = request_id
            self._engine[request_id] = self._unproven[request_id] = case
            self._trial = request_id if case.suspect else None
            due.append(request_id)
        return due

    def progressed(self, request_id: str, step: int) -> None:
        """Record that a request got tokens in a step, numbered by the engine."""
        case = self._unproven.get(request_id)
        if case is None:
            return
        if case.first_step is None:
            case.first_step = step
        elif case.first_step != step:
            self._prove(request_id, case)

    def _prove(self, request_id: str, case: Case) -> None:
        case.suspect, case.faults, case.deaths, case.losses = False, 0, 0, 0
        del self._unproven[request_id]
        if self._trial == request_id:
            self._trial = None

    def died(self, request_indices: Sequence[int] | None, *, fault: bool, lost: bool = False) -> str | None:
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
            ((request_id, case),) = suspects.items()
            case.losses += lost
            case.deaths += not lost
            case.faults += fault
            if case.faults >= FAULTS or case.deaths + case.losses >= DEATHS:
                convict = request_id
        for case in suspects.values():
            case.suspect = True
        marked, cleared, doubted = (
            {request_id: case for request_id, case in self._engine.items() if (bool(case.deaths), case.suspect) == kind}
            for kind in ((True, True), (False, False), (False, True))
        )
        self._waiting = {**marked, **cleared, **doubted, **self._waiting}
        self._engine, self._unproven, self._by_index = {}, {}, {}
        self._num_handed_over, self._trial = 0, None
        if convict is not None:
            self.remove_request(convict)
        return convict

    @property
    def suspects(self) -> set[str]:
        """Requests that may have killed an engine and are not proven since."""
        cases = (*self._waiting.items(), *self._engine.items())
        return {request_id for request_id, case in cases if case.suspect}

    def waiting(self, *, with_suspects: bool) -> list[str]:
        """Requests that wait for the engine, in order."""
        return [request_id for request_id, case in self._waiting.items() if with_suspects or not case.suspect]

    def _suspects(self, request_indices: Sequence[int] | None) -> dict[str, Case]:
        if request_indices is None:
            return dict(self._unproven)
        request_ids = {self._by_index.get(index) for index in request_indices}  # some may have ended meanwhile
        return {request_id: case for request_id, case in self._unproven.items() if request_id in request_ids}
