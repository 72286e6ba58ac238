"""Models as lists of layers, and the code that runs any of them.

families   one file for each family: from config.json to a `ModelSpec`
loading    from a checkpoint's files to a model's weights

Tested elsewhere: `tests/models/test_registry.py` and `tests/models/test_decoder.py`; `encoder`:
`tests/models/test_encoders.py`; `hf_keys`: `tests/models/test_config_keys.py`; `mtp`:
`tests/runner/test_mtp_runner.py`; `audio_tower` and `families/whisper`: `tests/models/test_whisper.py`;
`spectrogram`: `tests/models/test_audio_encoder.py`.
"""
