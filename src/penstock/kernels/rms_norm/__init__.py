"""Root-mean-square normalisation, alone or with the residual sum before it."""

from penstock.kernels.rms_norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
