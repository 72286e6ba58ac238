"""The HTTP server: connections, limits, logs, and the base of all dialects.

Each folder is a dialect; none imports another, except `tgi`, whose routes also accept TEI's and OpenAI's bodies.

Tested elsewhere: tests of a dialect are `tests/server/test_openai.py`, `tests/server/test_anthropic.py` and so on;
`body` and `body_route`: `tests/server/test_errors.py`, `tests/server/test_large_bodies.py`; `conversations`: each chat
dialect's; `encoding`: `tests/server/test_encoders.py`; `health` and `http`: `tests/server/test_serve.py`; `origins`:
`tests/server/test_client_paths.py`; `ray_serve`: `tests/e2e/test_ray_serve.py`; `request_account`:
`tests/server/test_limits.py`, `tests/server/test_call_context.py`; `dialects`: `tests/server/test_dialects_doc.py`;
`serving` and `streams`: `tests/server/test_dialect.py`; `logprobs`: `tests/server/test_openai.py`; `image_parts`:
`tests/server/test_images.py`; `model_changes`: `tests/server/test_many_models.py`.
"""
