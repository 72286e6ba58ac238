"""Text to tokens and back: the tokenizer, chat templates, and the processes that run what checkpoints bring."""
