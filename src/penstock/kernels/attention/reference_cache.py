"""The paged KV cache in plain torch, with the operations that write to it: head norms, RoPE, store.

key, value    [num_blocks, block_size, num_kv_heads, head_dim]      slot = block * block_size + offset in the block
              one tensor in a latent cache
scales        [num_blocks, block_size, num_kv_heads] float32, in an int8 cache

RoPE (Su et al., 2021, arXiv:2104.09864) uses the layout of Hugging Face weights:

head    x0 x1 .. | xh xh+1 ..  | rest        h = number of angles; pairs are (x0, xh), (x1, xh+1), ...
                                             `rest` is not rotated
interleaved     x0 y0 x1 y1 .. | rest        pairs are (x0, y0), (x1, y1), ...
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.attention import AttentionOptions, CacheShape, HeadNorms, LayerCaches, RopeOptions, reference
from penstock.kernels.batch import Batch
from penstock.kernels.elementwise.reference import rms_norm
from penstock.system.allocator import Allocator


class ReferenceCache:
    """The KV cache of one layer as plain tensors. See `LayerCache` for the methods."""

    def __init__(self, shape: CacheShape, allocator: Allocator) -> None:
        self.dtype, self.gather_limit = shape.dtype, shape.gather_limit
        slots = (shape.num_blocks, shape.block_size, shape.num_heads)
        self._latent = shape.latent
        self.key, self.key_scales = _new_side(slots, shape, allocator)
        self.value, self.value_scales = (
            (self.key, self.key_scales) if shape.latent else _new_side(slots, shape, allocator)
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        sources, targets = torch.tensor(pairs, dtype=torch.int64).to(self.key.device).unbind(1)
        for tensor in self.tensors():
            copy_blocks(tensor, sources, targets)

    def rope_and_cache(
        self,
        qkv: Tensor,
        options: RopeOptions[Tensor],
        angles: Tensor | None,
        batch: Batch,
        *,
        query_factors: Tensor | None = None,
    ) -> Tensor:
        kv_heads, head_dim = self.key.shape[2:]
        gates, norms = 1 + options.gated, options.norms
        heads = qkv.view(len(qkv), -1, head_dim)
        sizes = [options.num_heads * gates, kv_heads, kv_heads][: options.parts]
        query, *stored = torch.split(heads, sizes, dim=1)
        if options.parts == 2 and not self._latent:
            stored.append(stored[0].clone())
        query = query[:, ::gates]
        rotated = [query, *stored[:1]]
        if norms is not None and not norms.last:
            _normalize(rotated, norms)
        if norms is not None and options.value_norm and stored:
            ones = torch.ones(head_dim, dtype=torch.float32, device=qkv.device)
            stored[1] = rms_norm(stored[1], ones, norms.eps)
        if angles is not None:
            for part in rotated:
                apply_rotary(part, *angles.unbind(1), interleaved=options.interleaved)
        if norms is not None and norms.last:
            _normalize(rotated, norms)
        if query_factors is not None:
            query.mul_(query_factors.view(-1, 1, 1))
        if stored:
            store_kv(stored[0], stored[-1], self, batch.tensor("slots"))
        return qkv

    def attend(self, query: Tensor, options: AttentionOptions[Tensor], batch: Batch) -> Tensor:
        stored = reference.Stored(self.key, self.value, self.key_scales, self.value_scales)
        seen = reference.Seen(options.window, options.chunk, options.bidirectional)
        plan = batch.derived(reference.plan_attention, self.key.shape[1], self.gather_limit, seen)
        gates, head_dim = 1 + options.gated, self.key.shape[3]
        queries = query[:, : options.num_heads * gates * head_dim].view(len(query), -1, head_dim)[:, ::gates]
        ends = batch.seen_ends if options.takes_ends else None
        return reference.paged_attention(
            queries, stored, plan, options.scale, seen, options.soft_cap, options.sinks, options.position_bias, ends
        )

    def tensors(self) -> list[Tensor]:
        """All tensors of the cache, each [num_blocks, ...]."""
        keys, values = (self.key, self.key_scales), (self.value, self.value_scales)
        tensors = keys if self._latent else (*keys, *values)
        return [tensor for tensor in tensors if tensor is not None]


def _normalize(parts: Sequence[Tensor], norms: HeadNorms[Tensor]) -> None:
    """Normalize the queries, and the keys if the layer has its own, in place."""
    for part, weight in zip(parts, (norms.query, norms.key), strict=False):
        if weight is not None:
            part.copy_(rms_norm(part, weight, norms.eps))


def new_caches(shapes: Sequence[CacheShape], allocator: Allocator) -> LayerCaches[Tensor]:
    """Allocate zeroed caches of plain tensors."""
    layers = tuple(ReferenceCache(shape, allocator) for shape in shapes)
    blocks = GatheredBytes([tensor for layer in layers for tensor in layer.tensors()])
    return LayerCaches(layers, lambda num_blocks: None, blocks)


def _new_side(slots: tuple[int, int, int], shape: CacheShape, allocator: Allocator) -> tuple[Tensor, Tensor | None]:
    """Allocate keys or values, with their scales."""
    new = partial(_zeros, device=shape.device, allocator=allocator)
    scales = new(slots, torch.float32) if shape.dtype == torch.int8 else None
    return new((*slots, shape.head_dim), shape.dtype), scales


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, *, device: str, allocator: Allocator) -> Tensor:
    """A tensor of zeros; on a CPU only reserved, as the operating system zeroes pages on first touch."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(allocator.zeros(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


class GatheredBytes:
    """Blocks spread over several tensors, each [num_blocks, ...]: their parts are copied one after another."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._ends = np.cumsum([tensor[0].nbytes for tensor in tensors]).tolist()
        self.nbytes: int = self._ends[-1]

    def read(self, block: int) -> memoryview:
        parts = [tensor[block].contiguous().view(-1).view(torch.uint8).cpu() for tensor in self._tensors]
        content: NDArray[np.uint8] = torch.cat(parts).numpy()
        return content.data

    @torch.inference_mode()
    def fill(self, block: int, fill: Callable[[memoryview], bool]) -> bool:
        content = np.empty(self.nbytes, np.uint8)
        if not fill(content.data):
            return False
        first = 0
        for tensor, end in zip(self._tensors, self._ends, strict=True):
            part = tensor[block]
            part.copy_(torch.from_numpy(content[first:end]).view(part.dtype).view(part.shape))
            first = end
        return True


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotate the heads of `x` [num_tokens, num_heads, head_dim] in place, in float32.

    `cos` and `sin` [num_tokens, num_angles] float32 are those of the tokens' positions; 2 * num_angles <= head_dim.
    """
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated)


def store_kv(key: Tensor, value: Tensor, cache: ReferenceCache, slots: Tensor) -> None:
    """Write `key` and `value` [num_tokens, num_kv_heads, head_dim] to `slots` [num_tokens] int64.

    Converts them to the cache's dtype. The slots must be distinct.
    """
    for rows, target, scales in ((key, cache.key, cache.key_scales), (value, cache.value, cache.value_scales)):
        if scales is None:
            target.flatten(0, 1).index_copy_(0, slots, rows.to(target.dtype))
        else:
            integers, steps = reference.to_int8(reference.hadamard(rows.float()))
            target.flatten(0, 1).index_copy_(0, slots, integers)
            scales.flatten(0, 1).index_copy_(0, slots, steps / reference.hadamard_size(rows.shape[-1]))


def copy_blocks(tensor: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the blocks `sources` of `tensor` to the blocks `targets` [num_copies] int64, simultaneously."""
    tensor.index_copy_(0, targets, tensor.index_select(0, sources))
