"""The operations that layers are made of, a folder for each kind: `reference.py` defines the results.

`ops.py` has the table of a device's implementations, reference or native.
"""
