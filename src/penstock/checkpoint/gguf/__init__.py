"""GGUF files, llama.cpp's single-file model format: header, model config, tokenizer. No torch, no weights."""
