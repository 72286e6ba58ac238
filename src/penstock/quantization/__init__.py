"""Weights of every format: how layers ask for them, and how loading fills, rounds and packs them.

Tested elsewhere: `tests/quantization/test_stored.py`, `tests/quantization/test_float8.py` and
`tests/quantization/test_gguf_blocks.py` for stored formats; `base`, `rows` and `parameters`:
`tests/layers/test_linear.py`; `adapted`: `tests/test_llm_adapters.py`.
"""
