"""Which requests the engine has, which wait for it, and which of them it died of. Pure bookkeeping.

    add ──> waiting ──due──> in the engine: unproven ──tokens in two steps──> proven        remove: from anywhere
               ▲                     │                                          │
               └──── died: suspect ──┴────────────── died ─────────────────────┘

The requests of an engine that died go to the next one. Those that had computed a prompt and a decode since they were
handed over cannot have killed it at once, and go together. The others of the step that it died in are suspects: each is
handed over only when all others in the engine are proven, and no other follows before it is proven itself. So when the
engine dies again, at most one request is under suspicion, and that one gets a mark. A request with a mark is first in
the next engine, and alone there until it is proven: only a death that no other request can have caused convicts it.

An engine that was lost with its machine gives no such mark, but counts. A suspect may be taken to the engines of
another place: with what is known of it, so that it is tried there as it would have been here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FAULTS = 2
"""Crashes or hangs of the engine with a request as the only suspect, after which it is convicted."""
DEATHS = 3
"""The same for deaths of any kind: SIGKILL may come from outside, but rarely hits the same request again."""


@dataclass(slots=True)
class Case:
    """What is known of a request that is not proven."""

    place: int = -1
    first_step: int | None = None
    suspect: bool = False
    faults: int = 0
    deaths: int = 0
    losses: int = 0
    """Machines that were lost while it was the only suspect."""


class CrashBlame:
    """Requests by their ids, from `add` to `remove`. Places are those in the order of being handed over."""

    def __init__(self) -> None:
        self._waiting: dict[str, Case] = {}
        self._engine: dict[str, Case] = {}
        self._unproven: dict[str, Case] = {}  # a part of those in the engine
        self._places: dict[int, str] = {}
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
        """Whether a suspect is in the engine or waits for it, so that others would have to wait behind it."""
        return self._trial is not None or bool(self._waiting)

    def add_request(self, request_id: str, case: Case | None = None) -> None:
        """A request was accepted, or comes from another place as a suspect, with its case."""
        assert request_id not in self._waiting, f"request id {request_id!r} waits already"
        assert request_id not in self._engine, f"request id {request_id!r} is in the engine"
        self._waiting[request_id] = case or Case()

    def remove_request(self, request_id: str) -> Case | None:
        """A request has ended, however it did, or goes to another place: returns its case, if it is a suspect."""
        case = self._waiting.pop(request_id, None)
        if request_id in self._engine:
            case = self._engine.pop(request_id)
            self._unproven.pop(request_id, None)
            del self._places[case.place]
        if self._trial == request_id:
            self._trial = None
        return case if case is not None and case.suspect else None

    def due(self) -> list[str]:
        """The requests to hand over now, in this order; from now on the engine has them."""
        due = []
        while self._waiting and self._trial is None:
            request_id, case = next(iter(self._waiting.items()))
            if case.suspect and (self._engine if case.deaths else self._unproven):
                break
            del self._waiting[request_id]
            case.place, case.first_step = self._num_handed_over, None
            self._num_handed_over += 1
            self._places[case.place] = request_id
            self._engine[request_id] = self._unproven[request_id] = case
            self._trial = request_id if case.suspect else None
            due.append(request_id)
        return due

    def progressed(self, request_id: str, step: int) -> None:
        """A request got tokens in a step, by the engine's count."""
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
        """The engine died: all that it had waits for the next one. Returns the request that is convicted, if one is.

        Args:
            request_indices: the places of the requests in the step it died in; None if there was none, and then any
                that is not proven may be to blame.
            fault: whether it crashed or hung, rather than being killed from outside.
            lost: whether its machine was lost, or the way to it.
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
        self._engine, self._unproven, self._places = {}, {}, {}
        self._num_handed_over, self._trial = 0, None
        if convict is not None:
            self.remove_request(convict)
        return convict

    @property
    def suspects(self) -> set[str]:
        """Those that may have killed an engine and are not proven since."""
        cases = (*self._waiting.items(), *self._engine.items())
        return {request_id for request_id, case in cases if case.suspect}

    @property
    def cleared(self) -> list[str]:
        """Those that wait without being suspects, in order: another engine may have them."""
        return [request_id for request_id, case in self._waiting.items() if not case.suspect]

    def _suspects(self, request_indices: Sequence[int] | None) -> dict[str, Case]:
        if request_indices is None:
            return dict(self._unproven)
        request_ids = {self._places.get(place) for place in request_indices}  # some may have ended meanwhile
        return {request_id: case for request_id, case in self._unproven.items() if request_id in request_ids}
