"""The operations that layers are made of, a folder for each kind: `reference.py` defines the results.

`ops.py` has the table of a device's implementations, reference or native.

Tested elsewhere: `tests/kernels/` has a file for each kind of operation, which compares all implementations; `ops` and
the tables: `tests/kernels/test_adding_an_operation.py`, `tests/runner/test_recorded.py`.
"""
