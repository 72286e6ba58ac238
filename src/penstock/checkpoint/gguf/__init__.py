"""GGUF files, llama.cpp's single-file model format: header, model config, tokenizer. No torch, no weights.

Tested elsewhere: architectures, their keys, names and RoPE: `tests/models/test_gguf_families.py`; vocabulary and
pre-tokenizers: `tests/checkpoint/gguf/test_tokenizer.py`.
"""
