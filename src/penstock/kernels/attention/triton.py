"""Attention over a paged cache of bfloat16 in Triton. Not in any table of operations yet: it has run in Triton's
interpreter only.

The cache has the reference's layout (`reference_cache`). The query heads of a KV head are rows of one tile:

    decode     a program: segments of keys of sequences with one query, each with a partial result in float32;
               `merge_segments` merges a sequence's segments from left to right
    prefill    a program: a few queries of one sequence, its segments of keys one after another

Both compute a segment by the same online softmax in steps, and merge alike (`kernels/tree.py`), so a token gets the
same bits from either. Steps that a query does not see leave its numbers as they are.
"""

import itertools
import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.dataclass import dataclass
from penstock.kernels.batch import Batch
from penstock.kernels.tree import ATTENTION_SEGMENT, ATTENTION_STEP


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is cut."""

    decode_rows: int = 64
    """Rows of a decode program: the query heads of a KV head, padded. With 64, decode and prefill use the same matrix
    instruction of sm_90; 16 takes another, perhaps with other bits."""
    prefill_rows: int = 64
    decode_programs: int = 0
    """Programs of the decode kernel for each KV head, which take items in turn; 0: one for each item."""
    split: bool = True
    """Whether sequences with one query go to the decode kernel."""
    warps: int = 4
    stages: int = 2
    """Steps whose loads are in flight at a time."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step's attention as lists of work on the device, all int32."""

    query_start: Tensor
    seq_lens: Tensor
    table_start: Tensor
    blocks: Tensor
    items: Tensor
    """[num_items, 2]: sequence and segment, for the decode kernel."""
    num_items: Tensor
    """[1]: on the device, as a CUDA graph's launches are the same for any number."""
    decodes: Tensor
    """[num_decodes]: the sequences of the items."""
    first_item: Tensor
    """[num_decodes + 1]"""
    tiles: Tensor
    """[num_tiles, 2]: sequence and first query, for the prefill kernel."""


def plan_work(batch: Batch, window: int | None, queries_per_tile: int, *, split: bool, device: torch.device) -> Work:
    """List a step's work."""
    query_lens, seq_lens = np.diff(batch.column("query_start")), batch.column("seq_lens")
    decodes = [seq for seq, count in enumerate(query_lens) if split and count == 1]
    firsts = [max(0, int(seq_lens[seq]) - window) // ATTENTION_SEGMENT if window else 0 for seq in decodes]
    ends = [-(-int(seq_lens[seq]) // ATTENTION_SEGMENT) for seq in decodes]
    segments = list(map(range, firsts, ends))
    items = [(seq, segment) for seq, each in zip(decodes, segments, strict=True) for segment in each]
    first_item = [0, *itertools.accumulate(map(len, segments))]
    tiles = [
        (seq, first)
        for seq, count in enumerate(query_lens)
        if not (split and count == 1)
        for first in range(0, int(count), queries_per_tile)
    ]

    def upload(values: object) -> Tensor:
        return torch.from_numpy(np.array(values, np.int32)).to(device)

    columns = (upload(batch.column(name)) for name in ("query_start", "seq_lens", "table_start", "blocks"))
    return Work(*columns, *map(upload, (items, [len(items)], decodes, first_item, tiles)))


def paged_attention(
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    scale: float,
    window: int | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """Causal attention of each query over its sequence.

    Args:
        queries: [num_tokens, num_heads, head_dim] bfloat16, contiguous; `head_dim` is a power of two.
        key, value: [num_blocks, block_size, num_kv_heads, head_dim] bfloat16, contiguous; this step's are stored.
        window: a query at position p attends to the keys p - window < k <= p; None: to all k <= p.

    Returns [num_tokens, num_heads * head_dim] bfloat16.
    """
    assert queries.dtype == key.dtype == value.dtype == torch.bfloat16
    assert queries.is_contiguous()
    assert key.is_contiguous()
    assert value.is_contiguous()
    cut = cut or Cut()
    group = queries.shape[1] // key.shape[2]
    assert group <= min(cut.decode_rows, cut.prefill_rows)
    work = batch.derived(_planned, window, cut.prefill_rows // group, cut.split, queries.device)
    out = torch.empty_like(queries)
    shape = _Shape(group, key.shape[2], key.shape[3], key.shape[1], window or 0)
    scale *= math.log2(math.e)  # the kernels' exponentials are powers of two
    if len(work.items):
        decode(queries, key, value, work, out, scale, shape, cut)
    if len(work.tiles):
        prefill(queries, key, value, work, out, scale, shape, cut)
    return out.flatten(1)


@dataclass(frozen=True, slots=True)
class _Shape:
    group: int
    """Query heads of a KV head."""
    kv_heads: int
    head_dim: int
    block_size: int
    window: int
    """0: none."""


def _planned(batch: Batch, window: int | None, queries_per_tile: int, split: bool, device: torch.device) -> Work:
    return plan_work(batch, window, queries_per_tile, split=split, device=device)


def decode(
    queries: Tensor, key: Tensor, value: Tensor, work: Work, out: Tensor, scale: float, shape: _Shape, cut: Cut
) -> object:
    """Attention of the sequences of `work.items`. Returns the compiled kernel; None in the interpreter."""
    heads = shape.kv_heads * shape.group
    values = torch.empty(len(work.items), heads, shape.head_dim, dtype=torch.float32, device=queries.device)
    maxima, sums = torch.empty(2, len(work.items), heads, dtype=torch.float32, device=queries.device)
    programs = cut.decode_programs or len(work.items)
    compiled = decode_segments[(programs, shape.kv_heads)](
        queries,
        key,
        value,
        work.query_start,
        work.seq_lens,
        work.table_start,
        work.blocks,
        work.items,
        work.num_items,
        values,
        maxima,
        sums,
        scale,
        **_constants(shape),
        ROWS=cut.decode_rows,
        STAGES=cut.stages,
        num_warps=cut.warps,
        enable_fp_fusion=False,
    )
    merge_segments[(len(work.decodes), shape.kv_heads)](
        values,
        maxima,
        sums,
        work.decodes,
        work.first_item,
        work.query_start,
        out,
        GROUP=shape.group,
        ROWS=triton.next_power_of_2(shape.group),
        KV_HEADS=shape.kv_heads,
        DIM=shape.head_dim,
        enable_fp_fusion=False,
    )
    return compiled


def prefill(
    queries: Tensor, key: Tensor, value: Tensor, work: Work, out: Tensor, scale: float, shape: _Shape, cut: Cut
) -> object:
    """Attention of the queries of `work.tiles`. Returns the compiled kernel; None in the interpreter."""
    return prefill_tiles[(len(work.tiles), shape.kv_heads)](
        queries,
        key,
        value,
        work.query_start,
        work.seq_lens,
        work.table_start,
        work.blocks,
        work.tiles,
        out,
        scale,
        **_constants(shape),
        ROWS=cut.prefill_rows,
        STAGES=cut.stages,
        num_warps=cut.warps * max(1, cut.prefill_rows // 64),
        enable_fp_fusion=False,
    )


def _constants(shape: _Shape) -> dict[str, int]:
    return {
        "WINDOW": shape.window,
        "GROUP": shape.group,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "BLOCK": shape.block_size,
        "SEGMENT": ATTENTION_SEGMENT,
        "STEP": ATTENTION_STEP,
    }


@triton.jit
def _segment(
    query,
    position,
    key,
    value,
    table,
    kv_head,
    begin,
    visible,
    end,
    scale,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the keys from `begin`, a multiple of STEP, to `end`: maxima, sums and weighted values.

    Keys before `visible` are not read: no row sees them, and their blocks may belong to others by now.
    """
    dim = tl.arange(0, DIM)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for step in tl.range(begin, end, STEP, num_stages=STAGES):
        place = step + tl.arange(0, STEP)
        read = (place >= visible) & (place < end)
        block = tl.load(table + place // BLOCK, mask=read, other=0).to(tl.int64)
        at = ((block * BLOCK + place % BLOCK) * KV_HEADS + kv_head) * DIM
        keys = tl.load(key + at[:, None] + dim[None, :], mask=read[:, None], other=0.0)
        values = tl.load(value + at[:, None] + dim[None, :], mask=read[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys)) * scale
        seen = read[None, :] & (place[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(maximum - safe)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        acc = tl.dot(weights.to(tl.bfloat16), values, acc * shrink[:, None])
        maximum = new
    return maximum, total, acc


@triton.jit
def _merge(maximum, total, acc, next_maximum, next_total, next_acc):
    """Merge the partial results on both sides of a border."""
    new = tl.maximum(maximum, next_maximum)
    safe = tl.where(new == float("-inf"), 0.0, new)
    left = tl.exp2(maximum - safe)
    right = tl.exp2(next_maximum - safe)
    merged = tl.fma(next_acc, right[:, None], acc * left[:, None])
    return new, tl.fma(next_total, right, total * left), merged


@triton.jit
def decode_segments(
    queries,
    key,
    value,
    query_start,
    seq_lens,
    table_start,
    blocks,
    items,
    num_items,
    out_values,
    out_maxima,
    out_sums,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Items of (sequence, segment) in turn, for one KV head."""
    kv_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    mask = row < GROUP
    for item in tl.range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        seq = tl.load(items + 2 * item)
        segment = tl.load(items + 2 * item + 1)
        seq_len = tl.load(seq_lens + seq)
        head = tl.load(query_start + seq) * KV_HEADS * GROUP + kv_head * GROUP + row
        query = tl.load(queries + head[:, None].to(tl.int64) * DIM + dim[None, :], mask=mask[:, None], other=0.0)
        begin = segment * SEGMENT
        visible = 0
        if WINDOW > 0:
            visible = tl.maximum(seq_len - WINDOW, 0)
            begin = tl.maximum(begin, visible // STEP * STEP)
        maximum, total, acc = _segment(
            query,
            tl.zeros((ROWS,), tl.int32) + seq_len - 1,
            key,
            value,
            blocks + tl.load(table_start + seq),
            kv_head,
            begin,
            visible,
            tl.minimum((segment + 1) * SEGMENT, seq_len),
            scale,
            WINDOW,
            KV_HEADS,
            DIM,
            BLOCK,
            STEP,
            ROWS,
            STAGES,
        )
        to = (item * KV_HEADS + kv_head) * GROUP + row
        tl.store(out_values + to[:, None].to(tl.int64) * DIM + dim[None, :], acc, mask=mask[:, None])
        tl.store(out_maxima + to, maximum, mask=mask)
        tl.store(out_sums + to, total, mask=mask)


@triton.jit
def merge_segments(
    values,
    maxima,
    sums,
    decodes,
    first_item,
    query_start,
    out,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """The segments of one sequence and KV head, from left to right."""
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    mask = row < GROUP
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for item in tl.range(tl.load(first_item + index), tl.load(first_item + index + 1)):
        at = (item * KV_HEADS + kv_head) * GROUP + row
        next_acc = tl.load(values + at[:, None].to(tl.int64) * DIM + dim[None, :], mask=mask[:, None], other=0.0)
        next_maximum = tl.load(maxima + at, mask=mask, other=0.0)
        next_total = tl.load(sums + at, mask=mask, other=1.0)
        maximum, total, acc = _merge(maximum, total, acc, next_maximum, next_total, next_acc)
    head = tl.load(query_start + tl.load(decodes + index)) * KV_HEADS * GROUP + kv_head * GROUP + row
    result = (acc / total[:, None]).to(tl.bfloat16)
    tl.store(out + head[:, None].to(tl.int64) * DIM + dim[None, :], result, mask=mask[:, None])


@triton.jit
def prefill_tiles(
    queries,
    key,
    value,
    query_start,
    seq_lens,
    table_start,
    blocks,
    tiles,
    out,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of (sequence, first query): ROWS // GROUP queries with their GROUP heads, for one KV head."""
    kv_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    QUERIES: tl.constexpr = ROWS // GROUP
    seq = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    start = tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1) - start
    before = tl.load(seq_lens + seq) - count
    token = first + row // GROUP
    mask = (token < count) & (row < QUERIES * GROUP)
    head = (start + token) * KV_HEADS * GROUP + kv_head * GROUP + row % GROUP
    at = head[:, None].to(tl.int64) * DIM + dim[None, :]
    query = tl.load(queries + at, mask=mask[:, None], other=0.0)
    end = before + tl.minimum(count, first + QUERIES)
    visible = 0
    if WINDOW > 0:
        visible = tl.maximum(before + first - WINDOW + 1, 0)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for segment in tl.range(visible // SEGMENT, tl.cdiv(end, SEGMENT)):
        next_maximum, next_total, next_acc = _segment(
            query,
            before + token,
            key,
            value,
            blocks + tl.load(table_start + seq),
            kv_head,
            tl.maximum(segment * SEGMENT, visible // STEP * STEP),
            visible,
            tl.minimum((segment + 1) * SEGMENT, end),
            scale,
            WINDOW,
            KV_HEADS,
            DIM,
            BLOCK,
            STEP,
            ROWS,
            STAGES,
        )
        maximum, total, acc = _merge(maximum, total, acc, next_maximum, next_total, next_acc)
    tl.store(out + at, (acc / total[:, None]).to(tl.bfloat16), mask=mask[:, None])
