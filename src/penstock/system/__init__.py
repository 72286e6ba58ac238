"""Operating system services: cores and memory, sandboxed worker processes, the allocator, the cache of packed
weights, TOML files. Knows no model and no request.
"""
