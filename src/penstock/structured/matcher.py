"""A sequence's state in its grammar."""

from array import array
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock.structured.grammar import Grammar

_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


class Matcher:
    """Consumes the tokens of one answer, rolls back, and computes the mask of the next token."""

    def __init__(self, grammar: "Grammar") -> None:
        self._state = grammar.start.deep_copy()
        self._uniqueness = grammar.uniqueness
        self._followed: array[int] = array("i")
        self._scanned = [] if grammar.uniqueness is None else [grammar.uniqueness.scanner.start()]
        """The scanner's state before the first token and after each; empty without a uniqueness check."""

    @property
    def error(self) -> str:
        """llguidance's error message; empty if there is none."""
        return self._state.get_error() if self._state.is_error() else ""

    def follow(self, answer: "array[int]") -> bool:
        """Reset the matcher to the state after the tokens of `answer`; False if the grammar rejects them."""
        kept = len(self._followed)
        if self._followed != answer[:kept]:
            # Rejected drafts: only what differs is rolled back.
            kept = next(i for i, token in enumerate(self._followed) if i == len(answer) or token != answer[i])
            self._state.rollback(len(self._followed) - kept)
            del self._followed[kept:]
            del self._scanned[kept + 1 :]
        new = answer[kept:]
        count = self._scan(new[: self._state.try_consume_tokens(new.tolist())]) if new else 0
        self._followed.extend(new[:count])
        return count == len(new)

    def _scan(self, tokens: "array[int]") -> int:
        """Advance the uniqueness check by tokens that llguidance accepted.

        Returns the number of tokens that pass; llguidance is rolled back over the others.
        """
        if self._uniqueness is None:
            return len(tokens)
        for place, token in enumerate(tokens):
            state = self._uniqueness.follow(self._scanned[-1], token)
            if state is None:
                self._state.rollback(len(tokens) - place)
                return place
            self._scanned.append(state)
        return len(tokens)

    def allowed(self, row: NDArray[np.uint32], end: int) -> bool:
        """Fill the bitmask of the next token; returns whether the answer may end here.

        Args:
            row: one bit per token; bit `end`, which stands for the end, is cleared.
        """
        self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._state.is_error():
            row[:] = 0
            return False
        word, bit = divmod(end, 32)
        may_end = bool(row[word] & _BITS[bit])
        row[word] &= ~_BITS[bit]
        if self._uniqueness is not None:
            self._uniqueness.mask_out(row, self._scanned[-1], self._state)
        return may_end

    def forced(self) -> list[int]:
        """The tokens of the text that the grammar forces next, as the tokenizer encodes it."""
        return self._state.compute_ff_tokens()


def set_tokens(row: NDArray[np.uint32], tokens: "tuple[int, ...]", allowed: bool) -> None:
    """Allow or forbid tokens in a row of the bitmask."""
    for token in tokens:
        word, bit = divmod(token, 32)
        row[word] = row[word] | _BITS[bit] if allowed else row[word] & ~_BITS[bit]
