"""Quantization of weights to formats with groups of 32 columns, whose scales are multiples of a step per row.

reference   the rounding in plain torch
native      the same, bit for bit, by the native kernels
"""
