"""Rewrites JSON schemas to ones that llguidance enforces exactly; others are refused with a JSON pointer.

text ──parse──> values ──rewrite──> a schema for llguidance, and the lists with unique items ──> masks

Tested elsewhere: `tests/structured/test_features.py`, `tests/structured/test_sweep.py` and
`tests/structured/test_look_ahead.py` test schemas whole.
"""
