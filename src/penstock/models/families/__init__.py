"""The model families: one file for each, which reads config.json and returns a `ModelSpec`.

`dense.py` and `mixtures.py` read the keys that many share.

Tested elsewhere: `tests/models/test_families.py` and `tests/models/test_config_keys.py` have rows for each.
"""
