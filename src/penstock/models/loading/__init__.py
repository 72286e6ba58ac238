"""From a checkpoint's tensors, safetensors or GGUF, to the weights that a model asks for.

Also the packed weights that later starts map, and the formats that config.json or a GGUF file states.

Tested elsewhere: `tests/models/loading/test_loader.py`, `tests/models/loading/test_gguf_weights.py`,
`tests/quantization/test_stored.py`; `packed_key`: `tests/models/loading/test_packed_loading.py`.
"""
