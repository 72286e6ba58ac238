"""Drafts from the sequence's own text (prompt lookup): what followed when its last tokens stood there before.

The text is searched backwards for its last `SIZE` tokens, as bytes: nothing is built or kept for that, and a thousand
tokens take a microsecond. Once a place is found, it is followed for as long as it is right.

Source: Saxena, "Prompt Lookup Decoding", 2023, for the idea.
"""

from array import array

from penstock.core.sequence import INT32, Sequence
from penstock.core.speculation import NO_IDEA, Draft

SIZE = 3
_MAX_TRIES = 4
_WIDTH = array(INT32).itemsize


class NgramDrafter:
    """Guesses that a sequence goes on as it did before."""

    free = True

    def __init__(self) -> None:
        self._copying: dict[int, tuple[int, int]] = {}
        """By sequence: how many tokens there were, and the place of what might follow them."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in wanted]

    def _propose(self, seq: Sequence, limit: int) -> Draft:
        tokens = seq.tokens
        seen, place = self._copying.get(seq.sequence_id, (0, 0))
        copied = len(tokens) - seen
        if place and tokens[place : place + copied] == tokens[seen:]:
            place += copied
        else:
            place = _after_last_run(tokens)
        if not place:
            self._copying.pop(seq.sequence_id, None)
            return NO_IDEA
        self._copying[seq.sequence_id] = len(tokens), place
        draft = tokens[place : place + limit]
        for offset in range(limit - len(draft)):  # the text repeats itself: so does the draft
            draft.append(draft[offset])
        return draft

    def forget_sequence(self, seq: Sequence) -> None:
        self._copying.pop(seq.sequence_id, None)


def _after_last_run(tokens: "array[int]") -> int:
    """Where the last tokens stood before, the place of what followed; 0 for nowhere."""
    text = tokens.tobytes()
    run, end = text[-SIZE * _WIDTH :], len(text) - _WIDTH
    for _ in range(_MAX_TRIES):
        found = text.rfind(run, 0, end)
        if found < 0:
            break
        if found % _WIDTH == 0:
            return found // _WIDTH + SIZE
        end = found + len(run) - 1  # these bytes are parts of four tokens
    return 0
