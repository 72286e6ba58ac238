"""LoRA adapters in PEFT's folders and in GGUF files, checked against the model that they modify. No torch.

Tested elsewhere: `tests/checkpoint/adapters/test_folder.py` and `tests/checkpoint/adapters/test_peft.py` test all of
it.
"""
