"""Operating system services: cores and memory, sandboxed worker processes, the allocator, the cache of packed
weights, TOML files. Knows no model and no request.

Tested elsewhere: `loading_progress`: `tests/cli/test_commands.py`; `packed_file`: `tests/system/test_weight_cache.py`;
`toml`: `tests/cli/test_sources.py`; `worker_channel`: `tests/system/test_worker_process.py`.
"""
