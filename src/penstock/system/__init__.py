"""Operating system services: cores and memory, sandboxed worker processes, pre-faulted memory, the cache of packed
weights, TOML files. Knows no model and no request.
"""
