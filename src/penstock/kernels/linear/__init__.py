"""y = x Wᵀ + b: `reference.py` is the truth, and so far the only version."""

from penstock.kernels.linear.reference import linear

__all__ = ["linear"]
