"""Quantized checkpoints, written once: `penstock quantize`.

calibration   texts that show which inputs the matrices get: the model's own, or a file's
layerwise     one layer at a time: its inputs' Gram matrices, its rounded matrices, what it hands on
packed        matrices of integers as compressed-tensors stores them, and what config.json says of them
job           the order of work, the folder, going on after a kill
"""
