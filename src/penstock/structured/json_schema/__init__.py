"""JSON schemas that the grammar library enforces exactly; others are refused, with the place in the schema.

text ──parse──> values ──rewrite──> a schema for the library, and which items must differ ──> masks
"""
