"""Where the reader of a stream is, as the id of each event: with `Last-Event-ID` it goes on exactly there.

    id: cmpl-5f3a/17.4                     of the call `cmpl-5f3a`, 17 tokens of the first answer were sent and 4 of
                                           the second: for a server with a journal, which knows the call
    id: cmpl-5f3a/17.4~90210~1f3a5c7e9b2d  the same, and how it was computed: seed and arithmetic of each prompt. With
                                           it any server of the same model sends the rest, by computing it again. The
                                           digest of the call's adapter follows

An ending counts as one more. The id says how far the reader is in words of the answers, not of events or of the time
they came in: so it holds across restarts, and for tokens that were sent but not yet on disk when the server was killed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.errors import InvalidRequestError
from penstock.frontend.output_processor import CompletionDelta
from penstock.sampling_params import SEED_RANGE


@dataclass(frozen=True, slots=True)
class Origin:
    """Seeds, arithmetic and adapter that the answers of a call are computed with."""

    seeds: tuple[int, ...]
    """Of each prompt."""
    arithmetics: tuple[str, ...]
    """Of each prompt; empty where there is no token yet."""
    adapter: str = ""
    """The digest of the call's adapter."""

    def __str__(self) -> str:
        adapter = f"~{self.adapter}" if self.adapter else ""
        return f"~{'.'.join(map(str, self.seeds))}~{'.'.join(self.arithmetics)}{adapter}"

    @staticmethod
    def parse(seeds: str, arithmetics: str, *adapter: str) -> "Origin | None":
        """Parse the text of `str`; None if it is malformed."""
        numbers = tuple(int(seed) for seed in seeds.split(".") if seed.isascii() and seed.isdecimal())
        names = tuple(arithmetics.split("."))
        if not len(numbers) == len(names) == seeds.count(".") + 1 or max(numbers) >= SEED_RANGE or "" in adapter:
            return None
        return Origin(numbers, names, *adapter)


class StreamCursor:
    """Counts the tokens sent of each answer of a call, and skips those its reader has already."""

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
            sizes: how many answers each of its prompts gets.
            seen: how much of each answer the reader has; nothing if empty.
            origin: what the answers are computed from, as far as it is known; None if ids are not to hold it.
        """
        self.call = call
        self.origin = origin
        self._first = [0, *accumulate(sizes)]  # of each prompt's answers
        self._seen = list(seen) or [0] * self._first[-1]
        self.resumes = any(seen)
        """Whether the reader has had something before."""
        self._told = [0] * self._first[-1]

    @staticmethod
    def parse(event_id: str, sizes: Sequence[int]) -> "StreamCursor":
        """The bookmark of an event's id, for a call of as many answers.

        Raises:
            InvalidRequestError: it is no id of an event, or one of a call with another number of answers.
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
        """The events that a delta makes, the last with its id; nothing if the reader has them already."""
        answer = self._first[position] + delta.index
        self._told[answer] += len(delta.token_ids) + (delta.finish_reason is not None)
        if self._told[answer] <= self._seen[answer] and (self._told[answer] or self.resumes):
            return b""  # before the first token there may be events of the prompt
        self._seen[answer] = self._told[answer]
        if not events:
            return b""
        last = events.rfind(b"\n\n", 0, -2)
        start = 0 if last < 0 else last + 2
        event_id = f"{self.call}/{'.'.join(map(str, self._seen))}{self.origin() or ''}"
        return events[:start] + f"id: {event_id}\n".encode() + events[start:]
