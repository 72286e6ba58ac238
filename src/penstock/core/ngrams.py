"""Drafts from the sequence's own text (prompt lookup): what followed when its last tokens stood there before.

Each text has an index of where its runs of `SIZES` tokens were last seen, which grows with the text; a step costs the
same however long that is. The index is a table that later runs overwrite, so a hit is compared with the tokens.

Source: Saxena, "Prompt Lookup Decoding", 2023; the index and the pointer that goes on with a copy are our own.
"""

from array import array

import numpy as np

from penstock.core.drafts import NOTHING, Draft
from penstock.core.sequence import INT32, Sequence

SIZES = (4, 2)
"""Runs that are looked up, the longest first."""
MAX_READ = 8192
"""Tokens of a text that are read in one step, a millisecond's worth."""
_MAX_BITS = 17
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MASK = 2**64 - 1


class _Table:
    """Where each run of `size` tokens was last followed by another token."""

    def __init__(self, size: int, bits: int) -> None:
        self.size = size
        self._shift = 64 - bits
        self._multipliers = _MULTIPLIERS[:size]
        self._places = array(INT32, bytes(4 << bits))  # of the token that followed; 0 where there is none
        self._view = np.frombuffer(self._places, np.int32)

    def read(self, tokens: "array[int]", begin: int, end: int) -> None:
        """Take in the runs that the tokens from `begin` to before `end` follow."""
        begin = max(begin, self.size)
        if end - begin == 1:
            self._places[self._slot(tokens, begin)] = begin
        elif end > begin:
            known = np.frombuffer(tokens[begin - self.size : end - 1], np.int32).astype(np.uint64)
            count = end - begin
            hashes = np.zeros(count, np.uint64)
            for offset, multiplier in enumerate(self._multipliers):
                hashes += known[offset : offset + count] * np.uint64(multiplier)
            self._view[hashes >> np.uint64(self._shift)] = np.arange(begin, end)  # the last one of equal slots stays

    def find(self, tokens: "array[int]") -> int:
        """The place of what followed the text's last tokens when they were last there; 0 if they never were."""
        end, size = len(tokens), self.size
        if end < size:
            return 0
        place = self._places[self._slot(tokens, end)]
        return place if place and tokens[place - size : place] == tokens[end - size :] else 0

    def _slot(self, tokens: "array[int]", end: int) -> int:
        run = tokens[end - self.size : end]
        total = sum(token * multiplier for token, multiplier in zip(run, self._multipliers, strict=True))
        return (total & _MASK) >> self._shift


class _Text:
    """One sequence's tokens, as far as they were read, and the place in them that is being copied."""

    __slots__ = ("copying", "read_to", "seen", "tables")

    def __init__(self, max_length: int) -> None:
        bits = min(max_length.bit_length() + 1, _MAX_BITS)
        self.tables = [_Table(size, bits) for size in SIZES]
        self.read_to = 0
        self.seen = 0  # tokens there were when `copying` was set
        self.copying = 0  # the place of what might come next; 0 if there is none

    def next_place(self, tokens: "array[int]") -> int:
        """Where in the text stands what might come next; 0 for nowhere."""
        end = min(len(tokens), self.read_to + MAX_READ)
        for table in self.tables:
            table.read(tokens, self.read_to, end)
        self.read_to = end
        if end < len(tokens):
            return 0
        copied, place = end - self.seen, self.copying
        if place and tokens[place : place + copied] == tokens[self.seen :]:
            self.copying = place + copied
        else:
            self.copying = next(filter(None, (table.find(tokens) for table in self.tables)), 0)
        self.seen = end
        return self.copying


class NgramDrafter:
    """Guesses that a sequence goes on as it did before."""

    free = True

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in wanted]

    def _propose(self, seq: Sequence, limit: int) -> Draft:
        text = self._texts.get(seq.sequence_id)
        if text is None:
            text = self._texts[seq.sequence_id] = _Text(seq.max_length)
        place = text.next_place(seq.tokens)
        if not place:
            return NOTHING
        draft = seq.tokens[place : place + limit]
        period = len(draft)
        for offset in range(limit - period):  # the text repeats itself: so does the draft
            draft.append(draft[offset])
        return Draft(draft)

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq.sequence_id, None)
