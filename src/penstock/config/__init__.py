"""Every option of the engine, and what follows from options, model and machine: settings and the memory plan.

Pure functions of plain data, without torch: weight formats, quantization recipes and model facts belong to it.

Tested elsewhere: options, facts, `block_file`, `byte_counts` and `precision`: `tests/config/test_settings.py`,
`tests/config/test_memory.py`, which tests `footprint` and `machine`, too; `ranks`: `tests/runner/test_ranks.py`;
`weight_formats`, `recipes`, `feed_forward` and `state_layout`: `tests/layers/test_linear.py`,
`tests/kernels/test_experts.py`, `tests/kernels/test_recurrent.py`; `llm_options`: `tests/config/test_signatures.py`;
`sound_input`: `tests/checkpoint/test_sound_input.py`.
"""
