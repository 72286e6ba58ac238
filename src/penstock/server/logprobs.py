"""Log-probabilities in answers of all dialects."""

LEAST_LOGPROB = -9999.0
"""Log-probability of an impossible token, as JSON has no infinity."""
