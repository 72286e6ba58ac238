"""A request in the server's process: admission, input, output, history, metrics. No torch.

`client.py` is the engine as the server sees it; `recovery` has the journal and what resumes after a death.

Tested elsewhere: texts of encoders and pairs: `tests/server/test_encoders.py`; `adapters`:
`tests/server/test_adapters.py`; `live_requests`, `logprob_texts` and `arguments`: `tests/test_llm.py`;
`decoders`: `tests/frontend/images/test_reader.py`; `model_loads` and `served_model`:
`tests/frontend/test_served_models.py`; `model_names`: `tests/server/test_many_models.py`.
"""
