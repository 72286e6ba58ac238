"""One engine: the loop over scheduler and runner, its process, and the messages it exchanges with the server.

`build.py` makes it of its parts; `startup.py` works beside the import of modules.

Tested elsewhere: `adapters`: `tests/engine/test_adapter_room.py`; `info`: `tests/engine/test_protocol.py`; `build` and
`encoder_core`: `tests/e2e/test_same_answers.py`, `tests/server/test_encoders.py`; `block_tier`:
`tests/e2e/test_kv_disk.py`.
"""
