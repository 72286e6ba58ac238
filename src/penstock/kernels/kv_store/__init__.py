"""Writing to the paged KV cache: a step's new keys and values, and copies of whole blocks."""

from penstock.kernels.kv_store.reference import copy_blocks, store_kv

__all__ = ["copy_blocks", "store_kv"]
