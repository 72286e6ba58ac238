"""Log-probabilities on the wire."""

LEAST_LOGPROB = -9999.0
"""What stands for an impossible token's log-probability, as JSON has no infinity."""
