"""The tokens that a transcript's rules forbid; see `TranscriptRules`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.api.transcript_rules import TranscriptRules


def forbidden(logits: NDArray[np.float32], answer: Sequence[int], rules: TranscriptRules) -> NDArray[np.bool_]:
    """[vocab]: the tokens that must not follow an answer.

    Args:
        logits: [vocab] of the next token, after all other controls.
        answer: its tokens so far.
    """
    first = rules.first_timestamp
    forbidden = np.zeros(len(logits), np.bool_)
    if not answer:
        forbidden[list(rules.begin_suppress)] = True
    if not rules.has_timestamps:
        return forbidden
    forbidden[first - 1] = True
    if not answer:
        forbidden[:first] = True
        if rules.max_initial is not None:
            forbidden[first + rules.max_initial + 1 :] = True
    else:
        _forbid_by_pairs(forbidden, answer, rules)
    if _prefers_timestamp(np.where(forbidden, -np.inf, logits), first):
        forbidden[:first] = True
    return forbidden


def _forbid_by_pairs(forbidden: NDArray[np.bool_], answer: Sequence[int], rules: TranscriptRules) -> None:
    first = rules.first_timestamp
    ends_in_one = answer[-1] >= first
    ends_in_two = ends_in_one and (len(answer) < 2 or answer[-2] >= first)
    if ends_in_two:
        forbidden[first:] = True
    elif ends_in_one:
        forbidden[: rules.end] = True
    latest = next((token for token in reversed(answer) if token >= first), None)
    if latest is not None:  # only directly after the end of a segment may the same time be said again
        forbidden[first : latest + (not ends_in_one or ends_in_two)] = True


def _prefers_timestamp(logits: NDArray[np.floating], first: int) -> bool:
    """Whether timestamps are together more likely than any other token."""
    timestamps = logits[first:].astype(np.float64)
    most = timestamps.max(initial=-np.inf)
    if not np.isfinite(most):
        return False
    total = most + np.log(np.exp(timestamps - most).sum())
    return bool(total > logits[:first].max(initial=-np.inf))
