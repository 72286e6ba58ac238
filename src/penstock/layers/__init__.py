"""The parts of a model: each file has a kind's spec, and the class that states its weights and computes it."""
