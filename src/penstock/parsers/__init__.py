"""Incremental parsers of a chat model's output: reasoning, text and tool calls.

Tested elsewhere: `tests/parsers/test_formats.py` for every format; grammars: `tests/parsers/test_grammar.py`,
`tests/parsers/test_harmony_grammar.py`, `tests/parsers/test_gemma_grammar.py`.
"""
