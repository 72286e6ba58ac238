"""Weights to integers, in the formats of 32 columns a group that have their scales under a row's step.

reference   the rounding in plain torch
native      the same, bit for bit, by the native kernels
"""
