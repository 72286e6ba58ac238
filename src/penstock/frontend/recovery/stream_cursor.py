"""A stream reader's position, encoded in the id of each event: `Last-Event-ID` resumes exactly there.

    id: cmpl-5f3a/17.4                     of the call `cmpl-5f3a`, 17 tokens of the first answer were sent and 4 of
                                           the second: for a server with a journal, which knows the call
    id: cmpl-5f3a/17.4~90210~1f3a5c7e9b2d  the same, with seed and arithmetic of each prompt, so that any server of
                                           the same model can recompute and send the rest. The digest of the call's
                                           adapter follows

An ending counts as one more token. Positions count tokens of the answers, not events or times, so they stay valid
across restarts, and for tokens that were sent but not yet on disk when the server was killed.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from penstock.api.sampling_params import SEED_RANGE
from penstock.dataclass import dataclass
from penstock.errors import InvalidRequestError
from penstock.frontend.output_processor import CompletionDelta


@dataclass(frozen=True, slots=True)
class Origin:
    """Seeds, arithmetic and adapter that determine the answers of a call."""

    seeds: tuple[int, ...]
    """One per prompt."""
    arithmetics: tuple[str, ...]
    """One per prompt; empty before the first token."""
    adapter: str = ""
    """The digest of the call's adapter."""

    def __str__(self) -> str:
        adapter = f"~{self.adapter}" if self.adapter else ""
        return f"~{'.'.join(map(str, self.seeds))}~{'.'.join(self.arithmetics)}{adapter}"

    @staticmethod
    def parse(seeds: str, arithmetics: str, *adapter: str) -> "Origin | None":
        """Parse the output of `str`; None if it is malformed."""
        numbers = tuple(int(seed) for seed in seeds.split(".") if seed.isascii() and seed.isdecimal())
        names = tuple(arithmetics.split("."))
        if not len(numbers) == len(names) == seeds.count(".") + 1 or max(numbers) >= SEED_RANGE or "" in adapter:
            return None
        return Origin(numbers, names, *adapter)


class StreamCursor:
    """Counts the tokens sent of each answer of a call, and skips those the reader already has."""

    def __init__(
        self,
        call: str,
        sizes: Sequence[int],
        seen: Sequence[int] = (),
        origin: Callable[[], Origin | None] = lambda: None,
    ) -> None:
        """
        Args:
            call: the id of its first request.
            sizes: number of answers per prompt.
            seen: number of tokens of each answer that the reader has; empty: none.
            origin: what determines the answers, as far as known; None if ids do not contain it.
        """
        self.call = call
        self.origin = origin
        self._first = [0, *accumulate(sizes)]  # index of each prompt's first answer
        self._seen = list(seen) or [0] * self._first[-1]
        self.resumes = any(seen)
        """Whether the reader has received anything before."""
        self._told = [0] * self._first[-1]

    @staticmethod
    def call_of(event_id: str) -> str:
        """The id of the call that an event id belongs to."""
        return event_id.partition("~")[0].rpartition("/")[0]

    @staticmethod
    def parse(event_id: str, sizes: Sequence[int]) -> "StreamCursor":
        """The position encoded in an event id, for a call with this number of answers.

        Raises:
            InvalidRequestError: it is not an event id, or it belongs to a call with another number of answers.
        """
        place, *computed = event_id.split("~")
        call, _, counts = place.rpartition("/")
        seen = [int(count) for count in counts.split(".") if count.isascii() and count.isdecimal() and len(count) < 19]
        origin = Origin.parse(*computed) if len(computed) in (2, 3) else None
        is_sound = not computed or (origin is not None and len(origin.seeds) == len(sizes))
        if not call or not is_sound or len(seen) != counts.count(".") + 1 or len(seen) != sum(sizes):
            raise InvalidRequestError(f"Last-Event-ID {event_id!r} is not the id of an event of this call")
        return StreamCursor(call, sizes, seen, lambda: origin)

    def mark(self, position: int, delta: CompletionDelta, events: bytes) -> bytes:
        """The events of a delta, with the id on the last one; empty if the reader already has them."""
        answer = self._first[position] + delta.index
        self._told[answer] += len(delta.token_ids) + (delta.finish_reason is not None)
        if self._told[answer] <= self._seen[answer] and (self._told[answer] or self.resumes):
            return b""  # events of the prompt may come before the first token
        self._seen[answer] = self._told[answer]
        if not events:
            return b""
        last = events.rfind(b"\n\n", 0, -2)
        start = 0 if last < 0 else last + 2
        event_id = f"{self.call}/{'.'.join(map(str, self._seen))}{self.origin() or ''}"
        return events[:start] + f"id: {event_id}\n".encode() + events[start:]
