"""One sequence's place in its grammar."""

from array import array

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


class Matcher:
    """Follows the tokens of one answer, forth and back, and says which may come next."""

    def __init__(self, start: LLMatcher) -> None:
        self._state = start.deep_copy()
        self._followed: array[int] = array("i")

    @property
    def error(self) -> str:
        """Why the library gave up on it; empty if it did not."""
        return self._state.get_error() if self._state.is_error() else ""

    def follow(self, answer: "array[int]") -> bool:
        """Be where these tokens lead, whatever was followed before; False if they lead nowhere."""
        kept = len(self._followed)
        if self._followed != answer[:kept]:
            kept = next(i for i, token in enumerate(self._followed) if i == len(answer) or token != answer[i])
            self._state.rollback(len(self._followed) - kept)
            del self._followed[kept:]
        new = answer[kept:]
        count = self._state.try_consume_tokens(new.tolist()) if new else 0
        self._followed.extend(new[:count])
        return count == len(new)

    def allowed(self, row: NDArray[np.uint32], end: int) -> bool:
        """Write which tokens may come next; returns whether the answer may end here.

        Args:
            row: a bit a token; the bit `end`, which stands for the end, is cleared.
        """
        self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._state.is_error():
            row[:] = 0
            return False
        word, bit = divmod(end, 32)
        may_end = bool(row[word] & _BITS[bit])
        row[word] &= ~_BITS[bit]
        return may_end

    def forced(self) -> list[int]:
        """The tokens of the text that must come next, as a tokenizer would write it."""
        return self._state.compute_ff_tokens()


def set_tokens(row: NDArray[np.uint32], tokens: "tuple[int, ...]", allowed: bool) -> None:
    """Allow or forbid some tokens in a row of bits."""
    for token in tokens:
        word, bit = divmod(token, 32)
        row[word] = row[word] | _BITS[bit] if allowed else row[word] & ~_BITS[bit]
