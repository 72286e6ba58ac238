"""Log-probabilities on the wire, and what answers are ranked by."""

from penstock.request import CompletionOutput

LEAST_LOGPROB = -9999.0
"""What stands for an impossible token's log-probability, as JSON has no infinity."""


def mean_logprob(answer: CompletionOutput) -> float:
    """Of an answer's tokens: the higher, the better the answer, whatever its length."""
    entries = answer.logprobs or ()
    return sum(max(entry.logprob, LEAST_LOGPROB) for entry in entries) / max(len(entries), 1)
