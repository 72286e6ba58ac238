"""Drafts from the sequence's own text (prompt lookup): what followed when its last tokens stood there before.

Each text has a table of where each run of `SIZE` tokens was last followed by another. It is filled as the text grows,
so that a step costs the same however long that is. Runs may share a slot, and the later one has it: what is found is
compared with the tokens. Once a place is found, it is followed for as long as it is right.

Source: Saxena, "Prompt Lookup Decoding", 2023, for the idea.
"""

from array import array

import numpy as np

from penstock.core.drafts import Draft
from penstock.core.sequence import INT32, Sequence

SIZE = 3
MAX_READ = 16384
"""Tokens of a text that are read in one step, a millisecond's worth."""
_FEW = 32  # so many are read faster one by one than all at once
_MAX_BITS = 17
_FIRST, _SECOND, _THIRD = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_MASK = 2**64 - 1


class _Text:
    """One sequence's tokens, as far as they were read."""

    __slots__ = ("_copying", "_read_to", "_seen", "_shift", "_table")

    def __init__(self, max_length: int) -> None:
        bits = min(max_length.bit_length() + 1, _MAX_BITS)
        self._shift = 64 - bits
        self._table = array(INT32, bytes(4 << bits))  # place of what followed the run; 0 for none
        self._read_to = SIZE  # everything that follows a run before this place is in the table
        self._seen = 0  # tokens that there were when `_copying` was found
        self._copying = 0  # the place of what may come next; 0 for none

    def next_place(self, tokens: "array[int]") -> int:
        """Where in the text stands what may come next; 0 for nowhere."""
        length = len(tokens)
        if not self._read(tokens, length):
            return 0
        place = self._copying
        if place:
            copied = length - self._seen
            place = place + copied if tokens[place : place + copied] == tokens[self._seen :] else 0
        if not place:
            place = self._table[self._slot_of(tokens, length)]
            if tokens[place - SIZE : place] != tokens[length - SIZE :]:
                place = 0
        self._seen, self._copying = length, place
        return place

    def _read(self, tokens: "array[int]", length: int) -> bool:
        """Fill in the table. False if more is left to do, or the text is too short for a run."""
        begin, end = self._read_to, min(length, self._read_to + MAX_READ)
        if end - begin <= _FEW:
            for place in range(begin, end):
                self._table[self._slot_of(tokens, place)] = place
        else:
            known = np.frombuffer(tokens[begin - SIZE : end - 1], np.int32).astype(np.uint64)
            first, second, third = known[:-2], known[1:-1], known[2:]
            hashes = first * np.uint64(_FIRST) + second * np.uint64(_SECOND) + third * np.uint64(_THIRD)
            table = np.frombuffer(self._table, np.int32)
            table[hashes >> np.uint64(self._shift)] = np.arange(begin, end)  # of equal slots the last one stays
        self._read_to = max(begin, end)
        return begin <= length == max(begin, end)

    def _slot_of(self, tokens: "array[int]", end: int) -> int:
        total = tokens[end - 3] * _FIRST + tokens[end - 2] * _SECOND + tokens[end - 1] * _THIRD
        return (total & _MASK) >> self._shift


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
            return array(INT32)
        draft = seq.tokens[place : place + limit]
        for offset in range(limit - len(draft)):  # the text repeats itself: so does the draft
            draft.append(draft[offset])
        return draft

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq.sequence_id, None)
