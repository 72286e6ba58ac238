"""Attention of a step's queries over the paged KV cache."""

from penstock.kernels.paged_attention.batch import AttentionBatch, DecodeGroup, PromptChunk, build_batch
from penstock.kernels.paged_attention.reference import paged_attention

__all__ = ["AttentionBatch", "DecodeGroup", "PromptChunk", "build_batch", "paged_attention"]
