"""Weights of every format: how layers ask for them, and how loading fills, rounds and packs them."""
