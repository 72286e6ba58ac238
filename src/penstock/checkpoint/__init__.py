"""A model's files on disk: safetensors folders, GGUF files, encoders' and adapters' folders. No torch, no weights.

Files are untrusted: sizes are checked against limits before anything is read.
"""
