"""The scheduler and its parts: sequences, KV blocks, prefix cache, queues, speculation.

Pure Python on plain data: no torch, no clock, no input or output. A step is a `StepPlan` and its result.

Tested elsewhere: the parts of a step: `tests/core/test_scheduler.py`, `tests/core/test_scheduler_properties.py`;
`kv_manager`: `tests/core/test_prefix_cache.py`, `tests/core/test_states.py`; `fairness`:
`tests/core/test_fair_queue.py`, `tests/core/test_shares.py`; stored blocks: `tests/core/test_block_tier.py`,
`tests/runner/test_block_file.py`; `encoder`: `tests/models/test_encoders.py`.
"""
