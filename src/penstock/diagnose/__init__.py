"""Looks at an engine from outside: `penstock verify` (same answers in any company) and the calibration of
the simulator's costs.
"""
