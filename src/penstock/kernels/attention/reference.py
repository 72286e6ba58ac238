"""Attention over the paged KV cache in plain torch.

Decoding sequences (one query each) are computed together, over gathered keys padded to the longest; each prompt chunk
is computed separately. Query heads that share a KV head (grouped-query attention, Ainslie et al., 2023,
arXiv:2305.13245) read it in place: keys and values are not repeated. Queries for a cache in int8 or bfloat16 are
rounded alike; an int8 cache has the Hadamard transforms of keys and values.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from penstock.dataclass import dataclass
from penstock.kernels.batch import Batch, IntArray

MAX_SCORES = 2**22
"""Scores or mask entries in memory at a time: bounds the temporary memory of a long prompt chunk."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of a layer's cache; see `reference_cache` for the shapes."""

    key: Tensor
    value: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


@dataclass(frozen=True, slots=True)
class Seen:
    """The attention mask: which keys a query attends to."""

    window: int | None = None
    """Sliding window: number of keys up to the query's own; None: all."""
    chunk: int | None = None
    """Chunked attention: only keys from the last multiple of this on; None: no chunks."""
    bidirectional: bool = False
    """Whether queries also attend to later keys, within the window; for texts computed whole."""

    def first(self, positions: NDArray[Any]) -> NDArray[Any]:
        """The first visible key of the queries at `positions`."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return 0 * positions if self.window is None else np.maximum(0, positions + 1 - self.window)

    def end(self, positions: NDArray[Any], seq_len: int) -> NDArray[Any]:
        """One past the last visible key of the queries at `positions`."""
        if not self.bidirectional:
            return positions + 1
        return 0 * positions + seq_len if self.window is None else np.minimum(seq_len, positions + self.window)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, whose keys are gathered into one padded tensor."""

    rows: Tensor
    """[group] int64: rows of their queries in the step."""
    block_table: Tensor
    """[group, blocks] int64, from the first visible block on, padded with 0."""
    num_keys: Tensor
    """[group] int64: keys of each sequence from the block table's first on; the last is the query's own."""
    most_keys: int
    mask: Tensor | None
    """[group, most_keys] bool: true for visible keys; None: all are visible."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A sequence with several queries: rows `row` to `row + query_len` of the step."""

    row: int
    query_len: int
    start: int
    """Keys in `block_table` before the first query's own."""
    first: int
    """Keys of the sequence before `block_table`."""
    block_table: Tensor
    """[blocks] int64, from the first visible block on."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's attention work, divided into decode groups and prompt chunks."""

    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]


def plan_attention(batch: Batch, block_size: int, gather_limit: int, seen: Seen) -> AttentionPlan:
    """Divide a step's attention work.

    Blocks that the sliding window has passed are not read: they may belong to another sequence by now.

    Args:
        gather_limit: most keys of a decode group, padding included, unless a single sequence has more.
    """
    first_blocks = seen.first(batch.column("seq_lens") - np.diff(batch.column("query_start"))) // block_size
    decodes = tuple(_decode_groups(batch, block_size, gather_limit, seen, first_blocks))
    return AttentionPlan(decodes, tuple(_prompt_chunks(batch, block_size, first_blocks)))


def _decode_groups(
    batch: Batch, block_size: int, gather_limit: int, seen: Seen, first_blocks: IntArray
) -> Iterator[DecodeGroup]:
    """Group the sequences with one query in descending order of their keys, which keeps padding small."""
    query_start, num_keys = batch.column("query_start"), batch.column("seq_lens") - first_blocks * block_size
    device = batch.tensor("blocks").device
    order = np.flatnonzero(np.diff(query_start) == 1)
    order = order[np.argsort(-num_keys[order], kind="stable")]
    first = 0
    while first < len(order):
        most = int(num_keys[order[first]])
        width = -(-most // block_size)
        members = order[first : first + max(1, gather_limit // (width * block_size))]
        counts = torch.from_numpy(num_keys[members]).to(device).long()
        firsts = (seen.first(batch.column("seq_lens") - 1) - first_blocks * block_size)[members]
        mask = None
        if len(members) > 1 or firsts.any():
            mask = _decode_mask(counts, torch.from_numpy(firsts).to(device).long(), most)
        yield DecodeGroup(
            rows=torch.from_numpy(query_start[members]).to(device).long(),
            block_table=torch.from_numpy(_padded_tables(batch, members, first_blocks, width)).to(device).long(),
            num_keys=counts,
            most_keys=most,
            mask=mask,
        )
        first += len(members)


def _decode_mask(num_keys: Tensor, firsts: Tensor, most: int) -> Tensor:
    places = torch.arange(most, device=num_keys.device)
    return (places < num_keys.unsqueeze(1)) & (places >= firsts.unsqueeze(1))


def _padded_tables(batch: Batch, seqs: NDArray[np.int64], first_blocks: IntArray, width: int) -> IntArray:
    """`width` blocks of these sequences' tables, from `first_blocks` on, padded with 0."""
    table_start, blocks = batch.column("table_start"), batch.column("blocks")
    tables = np.zeros((len(seqs), width), np.int32)
    for row, seq in enumerate(seqs):
        table = blocks[table_start[seq] + first_blocks[seq] : table_start[seq + 1]][:width]
        tables[row, : len(table)] = table
    return tables


def _prompt_chunks(batch: Batch, block_size: int, first_blocks: IntArray) -> Iterator[PromptChunk]:
    query_start, seq_lens, table_start = (batch.column(name) for name in ("query_start", "seq_lens", "table_start"))
    blocks = batch.tensor("blocks")
    for seq in np.flatnonzero(np.diff(query_start) > 1).tolist():
        row, query_len = int(query_start[seq]), int(query_start[seq + 1] - query_start[seq])
        num_keys = int(seq_lens[seq] - first_blocks[seq] * block_size)
        first = int(table_start[seq] + first_blocks[seq])
        table = blocks[first : first - (-num_keys // block_size)]
        yield PromptChunk(row, query_len, num_keys - query_len, int(first_blocks[seq] * block_size), table)


def paged_attention(
    queries: Tensor,  # [num_tokens, num_heads, head_dim]
    cache: Stored,
    plan: AttentionPlan,
    scale: float,
    seen: Seen,
    soft_cap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None = None,
    seen_ends: IntArray | None = None,
) -> Tensor:
    """See `LayerCache.attend`.

    Args:
        position_bias: see `AttentionOptions`.
        seen_ends: see `Batch`; a sequence with one query sees no key after it.
    """
    dtype = queries.dtype
    if cache.key_scales is not None:
        # Like the keys in the cache: products of transformed rows are those of the rows, times `hadamard_size`.
        integers, steps = to_int8(hadamard(queries.float()))
        queries = (integers * steps.unsqueeze(-1)).to(dtype)
    elif cache.key.dtype == torch.bfloat16:
        queries = queries.bfloat16().to(dtype)
    out = torch.empty(queries.shape, dtype=dtype, device=queries.device)
    for group in plan.decodes:
        rows = queries.index_select(0, group.rows)
        out.index_copy_(0, group.rows, _decode(rows, cache, group, scale, soft_cap, sinks, position_bias))
    for chunk in plan.chunks:
        part = slice(chunk.row, chunk.row + chunk.query_len)
        ends = None if seen_ends is None else seen_ends[part] - chunk.first
        _prompt(queries[part], cache, chunk, scale, seen, soft_cap, sinks, position_bias, ends, out[part])
    if cache.key_scales is not None:
        # The cache has the values transformed, too; a second transform gives them back.
        out = hadamard(out.float()).to(dtype)
    return out.flatten(1)


def hadamard_size(head_dim: int) -> int:
    """Elements that `hadamard` transforms together: the largest power of two that divides a head."""
    return head_dim & -head_dim


def hadamard(rows: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of `rows` [..., head_dim], by runs of `hadamard_size`.

    It spreads each element over all others, so that a row has no outliers that would widen the steps of its integers
    (Ashkboos et al., 2024, arXiv:2404.00456). Transforming twice multiplies by `hadamard_size`.
    """
    size = hadamard_size(rows.shape[-1])
    runs = rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)
    for _ in range(size.bit_length() - 1):
        first, second = runs[..., : size // 2], runs[..., size // 2 :]
        runs = torch.stack((first + second, first - second), -1).flatten(-2)
    return runs.flatten(-2)


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `rows` [..., head_dim] to integers from -127 to 127, with a scale [...] per row.

    A row that contains NaN or infinity gets a NaN scale.
    """
    largest = rows.abs().amax(-1)
    usable = (largest >= 1e-30) & (largest <= 3e38)
    factor = torch.where(usable, 127.0 / largest, 0.0)
    integers = (rows * factor.unsqueeze(-1)).nan_to_num_().round_().to(torch.int8)
    # Integers cannot be NaN or infinite, so the row's scale has to tell.
    poison = (rows * 0.0).sum(-1)
    return integers, torch.where(usable, largest / 127.0, 0.0) + poison


def _decode(
    query: Tensor,  # [group, num_heads, head_dim]
    cache: Stored,
    group: DecodeGroup,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
) -> Tensor:
    size, num_heads, head_dim = query.shape
    num_kv_heads = cache.key.shape[2]
    bias = None
    if position_bias is not None:
        own = group.num_keys - 1
        apart = torch.arange(group.most_keys, device=own.device) - own.unsqueeze(1)
        by_head = position_bias[:, apart + position_bias.shape[1] // 2]  # [num_heads, group, most_keys]
        bias = by_head.transpose(0, 1).reshape(size, num_kv_heads, -1, group.most_keys)
    out = _attend(
        query.reshape(size, num_kv_heads, num_heads // num_kv_heads, head_dim),
        _gather(cache.key, cache.key_scales, group.block_table, group.most_keys, query.dtype).transpose(1, 2),
        _gather(cache.value, cache.value_scales, group.block_table, group.most_keys, query.dtype).transpose(1, 2),
        None if group.mask is None else group.mask[:, None, None, :],
        scale,
        soft_cap,
        None if sinks is None else sinks.view(num_kv_heads, -1, 1),
        bias,
    )  # [group, num_kv_heads, heads of one key head, head_dim]
    return out.reshape(size, num_heads, head_dim)


def _prompt(
    query: Tensor,  # [query_len, num_heads, head_dim]
    cache: Stored,
    chunk: PromptChunk,
    scale: float,
    seen: Seen,
    soft_cap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
    ends: NDArray[Any] | None,
    out: Tensor,
) -> None:
    query_len, num_heads, head_dim = query.shape
    num_kv_heads = cache.key.shape[2]
    seq_len = chunk.start + query_len
    by_head = (num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    table = chunk.block_table.unsqueeze(0)
    key, value = (
        _gather(entries, scales, table, seq_len, query.dtype)[0].transpose(0, 1).unsqueeze(1).expand(by_head)
        for entries, scales in ((cache.key, cache.key_scales), (cache.value, cache.value_scales))
    )
    by_query = None if sinks is None else sinks.view(*by_head[:2], 1, 1)
    # torch's fused attention takes a mask and nothing else; otherwise the scores of all heads are in memory.
    fused = soft_cap is None and sinks is None and position_bias is None
    scores_each = seq_len * (1 if fused else num_heads)
    # [num_kv_heads, heads of one key head, query_len, head_dim]
    queries = query.reshape(query_len, *by_head[:2], head_dim).permute(1, 2, 0, 3)
    target = out.view(query_len, *by_head[:2], head_dim).permute(1, 2, 0, 3)
    for first, last in _slices(query_len, scores_each):
        places = np.arange(chunk.start + first, chunk.start + last)
        first_keys = seen.first(places + chunk.first) - chunk.first
        end_keys = seen.end(places, seq_len) if ends is None else np.minimum(ends[first:last], seq_len)
        keys = slice(int(first_keys[0]), int(end_keys[-1]))
        mask = _mask(first_keys, end_keys).to(query.device)
        bias = None
        if position_bias is not None:
            apart = torch.arange(keys.start, keys.stop) - torch.from_numpy(places).unsqueeze(1)
            columns = (apart + position_bias.shape[1] // 2).to(query.device)
            bias = position_bias[:, columns].view(*by_head[:2], *apart.shape)
        rows = _attend(
            queries[:, :, first:last], key[:, :, keys], value[:, :, keys], mask, scale, soft_cap, by_query, bias
        )
        target[:, :, first:last] = rows


def _slices(query_len: int, scores_each: int) -> Iterator[tuple[int, int]]:
    """Split the queries into ranges that need at most MAX_SCORES scores each."""
    step = max(1, MAX_SCORES // scores_each)
    for first in range(0, query_len, step):
        yield first, min(first + step, query_len)


def _mask(first_keys: NDArray[Any], end_keys: NDArray[Any]) -> Tensor:
    """[queries, keys] bool: the visible keys of each query, beginning at the first query's first key."""
    keys = torch.arange(int(first_keys[0]), int(end_keys[-1]))
    return (keys < torch.from_numpy(end_keys).unsqueeze(1)) & (keys >= torch.from_numpy(first_keys).unsqueeze(1))


def _gather(cache: Tensor, scales: Tensor | None, block_table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` entries of each row of `block_table` -> [rows, length, num_kv_heads, head_dim]."""
    rows, blocks = block_table.shape
    entries = (rows, blocks * cache.shape[1], cache.shape[2])
    gathered = cache.index_select(0, block_table.reshape(-1)).view(*entries, -1)[:, :length]
    if scales is None:
        return gathered.to(dtype)
    steps = scales.index_select(0, block_table.reshape(-1)).view(entries)[:, :length]
    return (gathered * steps.unsqueeze(-1)).to(dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Plain attention: `query` [.., .., queries, head_dim] over `key` and `value` [.., .., keys, head_dim].

    `sinks` are the scores of an additional key whose value is 0; they broadcast to the scores of one key.
    `bias` is added to the scores.
    """
    if soft_cap is None and sinks is None and bias is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = query.float() @ key.float().transpose(-1, -2)
    scores = scores.mul_(scale) if soft_cap is None else torch.tanh(scores.mul_(scale / soft_cap)).mul_(soft_cap)
    if bias is not None:
        scores += bias
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    return (scores.softmax(-1)[..., : value.shape[-2]] @ value.float()).to(query.dtype)
