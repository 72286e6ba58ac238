"""A model's files on disk: safetensors folders, GGUF files, encoders' and adapters' folders. No torch, no weights.

Files are taken for hostile: sizes are bounded before anything is read.
"""
