"""Text to tokens and back: the tokenizer, chat templates, and the processes that run what checkpoints bring.

Tested elsewhere: the workers: `tests/text/test_chat_template.py`; `tokenizer_trial` and `known_templates`:
`tests/text/test_tokenizer.py`; `content`: `tests/server/test_images.py`.
"""
