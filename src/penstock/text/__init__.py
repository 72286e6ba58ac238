"""Text to tokens and back: the tokenizer, chat templates, and the processes that run or load a checkpoint's own.

Tested elsewhere: the workers: `tests/text/test_chat_template.py`; `tokenizer_trial`, `known_templates` and
`special_tokens`: `tests/text/test_tokenizer.py`; `content`: `tests/server/test_images.py`.
"""
