"""Drafts from grammars: the text that a grammar forces next, as the tokenizer encodes it.

Such text is property names, quotes, colons, and the rest of a choice after its first letters. Other tokens may spell
the same text, so the model still decides: each draft is verified by sampling under its mask.
"""

from array import array

from penstock.core.sequence import INT32, Sequence
from penstock.core.speculation import NO_DRAFT, Draft
from penstock.structured.masks import Grammars


class JumpAhead:
    """A `Drafter` for answers with a grammar."""

    free = True

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._guess(seq, limit) for seq, limit in wanted]

    def _guess(self, seq: Sequence, limit: int) -> Draft:
        if seq.params.structured is None:
            return NO_DRAFT
        answer = seq.tokens[len(seq.request.prompt_token_ids) :]
        return array(INT32, self._grammars.forced(seq.sequence_id, answer)[:limit])

    def forget_sequence(self, seq: Sequence) -> None:
        self._grammars.forget_sequence(seq.sequence_id)
