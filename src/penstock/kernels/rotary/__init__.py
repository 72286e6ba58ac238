"""Rotary position embedding, applied to queries and keys in place."""

from penstock.kernels.rotary.reference import apply_rotary

__all__ = ["apply_rotary"]
