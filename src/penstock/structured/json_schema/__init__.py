"""JSON schemas as the grammar library can hold them exactly; what it cannot is refused, with its place in the schema.

text ──parse──> values ──rewrite──> a schema for the library, and which items must differ ──> masks
"""
