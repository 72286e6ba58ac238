"""Runs a step's plan on the device: forward passes, sampling, adapters, stored blocks, ranks.

Tested elsewhere: `forward`: `tests/runner/test_recorded.py`, `tests/runner/test_kv_cache.py`; ranks, `runners`:
`tests/runner/test_ranks.py`; `adapters`: `tests/e2e/test_adapters.py`; `encoder_runner`:
`tests/models/test_encoders.py`; `fingerprint`: `tests/runner/test_ranks.py`; `audio_runner`:
`tests/models/test_whisper.py`.
"""
