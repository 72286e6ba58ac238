"""Enforces unique object keys and `uniqueItems`, which llguidance does not support.

    llguidance's mask ──> minus tokens that would repeat a key or an item ──> mask

A token is removed if it completes a key that the object already has, or if only such keys could follow it. Keys have
one spelling, since strings are written without numeric escapes.
"""

from collections.abc import Hashable, Iterable, Iterator

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from penstock.dataclass import dataclass
from penstock.structured.scanner import Mode, Scanner, State, scalar
from penstock.structured.vocabulary import Pieces

_LEADS = (b'"', b' "', b', "')
"""Beginnings of a token that opens a string."""
_IN_STRINGS = (Mode.KEY, Mode.STRING)
_OUTSIDE = (Mode.TEXT, Mode.THINKING)


@dataclass(frozen=True, slots=True)
class Uniqueness:
    """The uniqueness check of one grammar."""

    scanner: Scanner
    pieces: Pieces
    few: bool
    """Whether all allowed keys or items may be used, so that a prefix of one may have no completion."""

    def follow(self, state: State, token: int) -> State | None:
        """The state after a token; None if the token repeats a key or an item."""
        return self.scanner.follow(state, token, self.pieces.texts[token])

    def mask_out(self, row: NDArray[np.uint32], state: State, library: LLMatcher) -> None:
        """Clear the bits of tokens that would break uniqueness."""
        if state.mode in _OUTSIDE:
            return
        for token in [*self._repeating(row, state), *self._stranded(row, state, library)]:
            row[token >> 5] &= ~np.uint32(1 << (token & 31))

    def _repeating(self, row: NDArray[np.uint32], state: State) -> Iterator[int]:
        """Tokens that complete a repeated key or item."""
        yield from (token for rest in self._rests(state) for token in self.pieces.beginning_with(rest + b'"'))
        if state.mode in _IN_STRINGS:
            tokens = _allowed(row, self.pieces.past_quotes)
        else:
            tokens = _allowed(row, self.pieces.with_two_quotes)
            if state.level is not None and state.level.unique:
                tokens = np.concatenate([tokens, _allowed(row, self.pieces.past_scalars)])
        yield from (token for token in tokens.tolist() if self.follow(state, token) is None)

    def _rests(self, state: State) -> list[bytes]:
        """The suffixes that would complete the current key or item to one already used."""
        level = state.level
        if level is None or not (state.mode is Mode.KEY or (state.mode is Mode.STRING and level.unique)):
            return []
        before = state.text if level.is_object else b'"' + state.text
        return [used[len(before) :] for used in level.used if isinstance(used, bytes) and used.startswith(before)]

    def _stranded(self, row: NDArray[np.uint32], state: State, library: LLMatcher) -> Iterator[int]:
        """Tokens after which a key or an item could only complete to a duplicate."""
        level = state.level
        if level is None or not level.used or not self.few:
            return
        values = self.scanner.values(level) if level.unique else None
        if values is not None:
            yield from self._without_value(row, state, values)
            return
        wholes = self._rests(state)
        if state.mode not in _IN_STRINGS and (level.is_object or level.unique):
            quoted = [used if level.is_object else used[1:] for used in level.used if isinstance(used, bytes)]
            wholes = [lead + used for used in quoted for lead in _LEADS]
        for whole in filter(None, wholes):
            for token in _allowed(row, self.pieces.equal_to(whole)).tolist():
                if not self._goes_on(library, token):
                    yield token

    def _without_value(self, row: NDArray[np.uint32], state: State, values: Iterable[bytes]) -> Iterator[int]:
        """Tokens that begin none of the remaining values of a list."""
        for token in np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist():
            after = self.follow(state, token)
            if after is None or after.level is None or after.mode not in (Mode.STRING, Mode.SCALAR):
                continue
            if state.level is None or after.level.outer is not state.level.outer:  # it is in another list by then
                continue
            begun = b'"' + after.text if after.mode is Mode.STRING else after.text
            used = after.level.used
            if not any(value.startswith(begun) and _item(value) not in used for value in values):
                yield token

    def _goes_on(self, library: LLMatcher, token: int) -> bool:
        """Whether a string can continue after a token."""
        ahead = library.deep_copy()
        ahead.consume_token(token)
        row = np.zeros_like(self.pieces.ending)
        ahead.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return bool((row & ~self.pieces.ending).any())


def _allowed(row: NDArray[np.uint32], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens that a mask allows."""
    bits = row[tokens >> 5] >> (tokens & 31).astype(np.uint32)
    chosen: NDArray[np.int64] = tokens[(bits & np.uint32(1)).astype(np.bool_)]
    return chosen


def _item(value: bytes) -> Hashable:
    """A value as stored in `Level.used`: strings without the closing quote."""
    return value[:-1] if value.startswith(b'"') else scalar(value)
