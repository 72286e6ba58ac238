"""The parts of a model: each file has a kind's spec, and the class that states its weights and computes it.

Tested elsewhere: `tests/models/test_families.py` compares whole models with `transformers`;
`tests/models/test_sizes.py` the sizes.
"""
