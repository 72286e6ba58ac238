"""A model's files on disk: safetensors folders, GGUF files, encoders' and adapters' folders. No torch, no weights.

Files are untrusted: sizes are checked against limits before anything is read.

Tested elsewhere: `encoder_config`: `tests/models/test_encoders.py`; `float_bits`: `tests/quantization/test_float8.py`;
`generation_config`: `tests/frontend/test_input_processor.py`; `hub_cache`, `hub_download` and `aliases`:
`tests/cli/test_pull.py`; `data_folder`: `tests/checkpoint/test_added.py`, `tests/checkpoint/test_created.py`.
"""
