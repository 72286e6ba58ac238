"""Rows of a table by their numbers, rows times a number, and the gated activation."""
