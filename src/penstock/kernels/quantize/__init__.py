"""Quantization of weights to formats with groups of 32 columns, whose scales are multiples of a step per row.

reference   the rounding in plain torch
native      the same, bit for bit, by the native kernels
"""

from penstock.config.weight_formats import WeightFormat


def zero_units(format: WeightFormat) -> int:
    """Units of a stored zero point per step of the values; 0: the zero is the centre, and is not stored."""
    return 0 if format.offset == "centre" else format.values_per_zero
