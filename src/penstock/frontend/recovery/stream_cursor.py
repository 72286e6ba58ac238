"""Where the reader of a stream is, as the id of each event: with `Last-Event-ID` it goes on exactly there.

    id: cmpl-5f3a/17.4        of the call `cmpl-5f3a`, 17 tokens of the first answer were told and 4 of the second

An ending counts as one more. The id says how far the reader is in words of the answers, not of events or of the time
they came in: so it holds across restarts, and for tokens that were sent but not yet on disk when the server was killed.
"""

from collections.abc import Sequence
from itertools import accumulate

from penstock.errors import InvalidRequestError
from penstock.frontend.output_processor import CompletionDelta


class StreamCursor:
    """Counts the tokens sent of each answer of a call, and skips those its reader has already."""

    def __init__(self, call: str, sizes: Sequence[int], seen: Sequence[int] = ()) -> None:
        """
        Args:
            call: the id of its first request.
            sizes: how many answers each of its prompts gets.
            seen: how much of each answer the reader has; nothing if empty.
        """
        self.call = call
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
        call, _, counts = event_id.rpartition("/")
        seen = [int(count) for count in counts.split(".") if count.isascii() and count.isdecimal() and len(count) < 19]
        if not call or len(seen) != counts.count(".") + 1 or len(seen) != sum(sizes):
            raise InvalidRequestError(f"Last-Event-ID {event_id!r} is not the id of an event of this call")
        return StreamCursor(call, sizes, seen)

    def mark(self, position: int, delta: CompletionDelta, events: bytes) -> bytes:
        """The events that a delta makes, the last with its id; nothing if the reader has them already."""
        answer = self._first[position] + delta.index
        self._told[answer] += len(delta.token_ids) + (delta.finish_reason is not None)
        if self._told[answer] <= self._seen[answer]:
            return b""
        self._seen[answer] = self._told[answer]
        if not events:
            return b""
        last = events.rfind(b"\n\n", 0, -2)
        start = 0 if last < 0 else last + 2
        return events[:start] + f"id: {self.call}/{'.'.join(map(str, self._seen))}\n".encode() + events[start:]
