"""Tokenizers of folders without tokenizer.json, converted from other files.

Tested elsewhere: `form` and `convert`: `tests/text/vocabularies/test_vocab_json.py`; `tekken`, `tiktoken`:
`tests/text/vocabularies/test_ranks.py`; `sentencepiece_proto`, `unigram`:
`tests/text/vocabularies/test_sentencepiece.py`.
"""
