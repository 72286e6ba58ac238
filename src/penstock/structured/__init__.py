"""Structured output: from a schema, regex or grammar to a mask of the allowed tokens.

`json_schema` rewrites schemas for the grammar library; untrusted grammars are tried in a worker process.

Tested elsewhere: `scanner`: `tests/structured/test_uniqueness.py`; `lark`: `tests/structured/test_grammar.py`.
"""
