"""Where guesses of the next tokens come from: the seam between speculation and whoever guesses.

A draft is computed as if it were the sequence's next tokens, in the step that finds out whether it is. A good one saves
steps, a bad one costs a little time; neither changes what is answered (docs/sampling.md says why).
"""

from array import array
from typing import Protocol, TypeAlias

from penstock.core.sequence import INT32, Sequence

Draft: TypeAlias = "array[int]"
"""What a sequence's next tokens might be; int32, empty where there is no idea. Not changed once it is given."""
NO_IDEA: Draft = array(INT32)


class Drafter(Protocol):
    """Guesses the next tokens of sequences between two steps.

    Whatever it keeps of a sequence must be recomputable from its tokens: it may be asked about any sequence at any
    time, with tokens added since. A sequence's `sequence_id`, `tokens`, `params`, `index`, `max_length` and `request`
    are there to be read; the rest is none of its business.
    """

    free: bool
    """Whether guessing costs next to nothing: then it is asked at each step, if only to see how good it would be, and
    before one that is not."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        """Guess next tokens of each of these sequences, at most as many as are named, which is one or more."""
        ...

    def forget_sequence(self, seq: Sequence) -> None:
        """The sequence has ended; perhaps it was never heard of."""
        ...
