"""Disentangled attention in plain torch, text by text and head by head."""

import itertools

import torch
from torch import Tensor

from penstock.kernels.batch import Batch
from penstock.kernels.disentangled import DisentangledOptions


def disentangled_attention(qkv: Tensor, options: DisentangledOptions[Tensor], batch: Batch) -> Tensor:
    """See `Ops.disentangled_attention`."""
    parts = qkv.float().view(len(qkv), 3, options.num_heads, -1)
    out = torch.empty(len(qkv), *parts.shape[2:], dtype=qkv.dtype, device=qkv.device)
    for first, last in itertools.pairwise(batch.column("query_start").tolist()):
        buckets = _buckets(options.buckets, last - first)
        for head in range(options.num_heads):
            query, key, value = parts[first:last, :, head].unbind(1)
            scores = query @ key.T
            if options.keys is not None:
                scores += (query @ options.keys[head]).gather(1, buckets)
            if options.queries is not None:
                scores += (key @ options.queries[head]).gather(1, buckets.T).T
            out[first:last, head] = (scores.mul_(options.scale).softmax(-1) @ value).to(qkv.dtype)
    return out.flatten(1)


def _buckets(by_distance: Tensor, length: int) -> Tensor:
    """[queries, keys] int64 of a text."""
    places = torch.arange(length, device=by_distance.device)
    return by_distance[places.unsqueeze(1) - places + len(by_distance) // 2].long()
