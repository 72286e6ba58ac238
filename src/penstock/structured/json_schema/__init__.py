"""Rewrites JSON schemas to ones that llguidance enforces exactly; others are refused with a JSON pointer.

text ──parse──> values ──rewrite──> a schema for llguidance, and the lists with unique items ──> masks
"""
