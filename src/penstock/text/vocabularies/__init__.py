"""Tokenizers of folders without tokenizer.json, converted from other files.

Tested elsewhere: `form`: `tests/text/vocabularies/test_vocab_json.py`.
"""
