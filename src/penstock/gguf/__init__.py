"""GGUF files, llama.cpp's format of one file a model: header, model config, tokenizer. No torch, no weights."""
