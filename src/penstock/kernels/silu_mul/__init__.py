"""The gated activation of the MLP."""

from penstock.kernels.silu_mul.reference import silu_mul

__all__ = ["silu_mul"]
