"""Prompt lookup drafts: the tokens that followed an earlier occurrence of the sequence's last tokens.

The text is searched backwards, as bytes, for its last `SIZE` tokens: there is no index to build, and a thousand tokens
take a microsecond. A match is followed for as long as its drafts are accepted.

Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

from array import array

from penstock.core.sequence import INT32, Sequence
from penstock.core.speculation import NO_DRAFT, Draft

SIZE = 3
_MAX_TRIES = 4
_WIDTH = array(INT32).itemsize


class NgramDrafter:
    """Drafts the continuation of an earlier occurrence of the last tokens."""

    free = True

    def __init__(self) -> None:
        self._copying: dict[int, tuple[int, int]] = {}
        """By sequence: its number of tokens, and the index of the tokens that may follow."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in wanted]

    def _propose(self, seq: Sequence, limit: int) -> Draft:
        tokens = seq.tokens
        seen, start = self._copying.get(seq.sequence_id, (0, 0))
        copied = len(tokens) - seen
        # The text followed the copy, so the search for another occurrence is spared.
        if start and tokens[start : start + copied] == tokens[seen:]:
            start += copied
        else:
            start = _after_last_run(tokens)
        if not start:
            self._copying.pop(seq.sequence_id, None)
            return NO_DRAFT
        self._copying[seq.sequence_id] = len(tokens), start
        draft = tokens[start : start + limit]
        for offset in range(limit - len(draft)):  # continues into the draft itself where the text is periodic
            draft.append(draft[offset])
        return draft[: _next_image(seq, start) - start] if start < seq.image_end else draft

    def forget_sequence(self, seq: Sequence) -> None:
        self._copying.pop(seq.sequence_id, None)


def _next_image(seq: Sequence, start: int) -> int:
    """Index of the first token from `start` on that stands for an image, as none in an answer does."""
    return max(start, next(image.start for image in seq.request.images if image.start + image.count > start))


def _after_last_run(tokens: "array[int]") -> int:
    """Index after the latest earlier occurrence of the last tokens; 0: none."""
    text = tokens.tobytes()
    run, end = text[-SIZE * _WIDTH :], len(text) - _WIDTH
    # Few, as each searches the whole text.
    for _ in range(_MAX_TRIES):
        at = text.rfind(run, 0, end)
        if at < 0:
            break
        # Bytes match at any offset; only one at a token's border is a match of tokens.
        if at % _WIDTH == 0:
            return at // _WIDTH + SIZE
        end = at + len(run) - 1  # a match between the borders of tokens: search before it
    return 0
