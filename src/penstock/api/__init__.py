"""What a user writes and reads: requests, sampling parameters, tools, outputs.

Plain data that every other room may import; it imports only `penstock.errors`.

Tested elsewhere: `subschemas` and `tools`: `tests/parsers/test_grammar.py`, `tests/parsers/test_described_tools.py`.
"""
