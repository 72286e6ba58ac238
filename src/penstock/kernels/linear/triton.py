"""Linear maps of bfloat16 in Triton. Not in any table of operations yet: it has run in Triton's interpreter only.

Weights are the first operand of the matrix multiplication, and tokens its narrow side, so that one family of
instructions serves 1 to 64 tokens. `kernels/tree.py` fixes the order of sums. With few tokens, each segment of columns
is computed by a program of its own, which leaves a partial sum in float32; `_sum_segments` adds them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.dataclass import dataclass
from penstock.kernels.tree import LINEAR_SEGMENT, LINEAR_STEP


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut; no cut changes a bit of the result."""

    tokens: int
    """Tokens of a program, at least 16."""
    rows: int
    """Rows of the weight of a program."""
    split: bool
    """Whether each segment of columns has a program of its own."""
    warps: int = 4
    stages: int = 4
    """Steps whose loads are in flight at a time."""


FEW, SOME, MANY = Tile(16, 64, True), Tile(64, 64, False), Tile(128, 128, False, warps=8, stages=3)
SUM_COLUMNS = 1024


def tile_of(num_tokens: int) -> Tile:
    """The tile for a step of so many tokens: from a fixed table, as tuning at run time would not repeat itself."""
    if num_tokens <= FEW.tokens:
        return FEW
    return SOME if num_tokens <= SOME.tokens else MANY


def linear(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """Multiply by a weight: x Wᵀ, rounded once.

    Args:
        x: [num_tokens, columns] bfloat16, contiguous.
        weight: [rows, columns] bfloat16, contiguous.
        tile: None: by the number of tokens.

    Returns [num_tokens, rows] bfloat16.
    """
    assert x.dtype == weight.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert weight.is_contiguous()
    (num_tokens, columns), rows = x.shape, len(weight)
    tile = tile or tile_of(num_tokens)
    out = torch.empty(num_tokens, rows, dtype=x.dtype, device=x.device)
    segments = triton.cdiv(columns, LINEAR_SEGMENT)
    split = tile.split and segments > 1
    sums = torch.empty(segments, num_tokens, rows, dtype=torch.float32, device=x.device) if split else out
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(num_tokens, tile.tokens), segments if split else 1)
    launch(grid, x, weight, sums, tile, split=split)
    if split:
        sum_grid = (num_tokens, triton.cdiv(rows, SUM_COLUMNS))
        _sum_segments[sum_grid](sums, out, num_tokens, rows, SEGMENTS=segments, COLUMNS=SUM_COLUMNS)
    return out


def launch(grid: tuple[int, int, int], x: Tensor, weight: Tensor, sums: Tensor, tile: Tile, *, split: bool) -> object:
    """Launch the multiplication alone. Returns the compiled kernel; None in the interpreter."""
    (num_tokens, columns), rows = x.shape, len(weight)
    return multiply[grid](
        x,
        weight,
        sums,
        num_tokens,
        rows,
        columns,
        SPLIT=split,
        ALIGNED=columns % LINEAR_STEP == 0,
        SEGMENT=LINEAR_SEGMENT,
        STEP=LINEAR_STEP,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        STAGES=tile.stages,
        num_warps=tile.warps,
        enable_fp_fusion=False,  # or a compiler might contract one tile's arithmetic and not another's
    )


@triton.jit
def multiply(
    x,
    weight,
    out,
    num_tokens,
    num_rows,
    num_columns,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    SEGMENT: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of rows and tokens. With SPLIT one segment of it: `out` is then [segments, num_tokens, num_rows] float32.

    ALIGNED: steps are whole, so columns need no mask.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    weight_at = weight + row[:, None].to(tl.int64) * num_columns
    x_at = x + token[None, :].to(tl.int64) * num_columns
    first = 0
    end = tl.cdiv(num_columns, SEGMENT)
    if SPLIT:
        first = tl.program_id(2)
        end = first + 1
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for segment in tl.range(first, end):
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        begin = segment * SEGMENT
        for step in tl.range(begin, tl.minimum(begin + SEGMENT, num_columns), STEP, num_stages=STAGES):
            column = step + tl.arange(0, STEP)
            row_mask = (row < num_rows)[:, None]
            token_mask = (token < num_tokens)[None, :]
            if not ALIGNED:
                row_mask = row_mask & (column < num_columns)[None, :]
                token_mask = token_mask & (column < num_columns)[:, None]
            w_tile = tl.load(weight_at + column[None, :], mask=row_mask, other=0.0)
            x_tile = tl.load(x_at + column[:, None], mask=token_mask, other=0.0)
            acc = tl.dot(w_tile, x_tile, acc)
        total = total + acc  # 0 + acc is acc, but for the sign of a zero: with SPLIT, too
    mask = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    if SPLIT:
        at = (first * num_tokens + token[None, :]).to(tl.int64) * num_rows + row[:, None]
        tl.store(out + at, total, mask=mask)
    else:
        tl.store(out + token[None, :].to(tl.int64) * num_rows + row[:, None], total.to(tl.bfloat16), mask=mask)


@triton.jit
def _sum_segments(sums, out, num_tokens, num_rows, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the segments of a token's rows from left to right."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        at = sums + (segment * num_tokens + token) * num_rows + row
        total = total + tl.load(at, mask=row < num_rows, other=0.0)
    tl.store(out + token * num_rows + row, total.to(tl.bfloat16), mask=row < num_rows)
