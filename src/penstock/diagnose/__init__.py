"""Diagnoses of an engine: `penstock verify` (answers do not depend on the batch), and calibration of the simulator's
step costs.
"""
