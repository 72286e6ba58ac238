"""Small Triton kernels that measure a machine. In the interpreter, they are decorated after it is mended."""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if os.environ.get("TRITON_INTERPRET") == "1":
    import tests.kernels.triton_interpreter  # noqa: F401


@triton.jit
def read(x, out, size, BLOCK: tl.constexpr):
    """Reads all of `x`, and leaves a sum of each program."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK, num_stages=4):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < size, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def multiply_int8(a, b, out, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """a [ROWS, K] by b [COLUMNS, K], both int8: out [ROWS, COLUMNS] int32, by one program.

    K is no constant: of a large one the compiler takes 20 s.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in tl.range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        left = tl.load(a + row[:, None] * K + k[None, :])
        right = tl.load(b + column[None, :] * K + k[:, None])
        acc = tl.dot(left, right, acc, out_dtype=tl.int32)
    tl.store(out + row[:, None] * COLUMNS + column[None, :], acc)


@triton.jit
def increment(x, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Adds 1 to `x` [num_programs * BLOCK]. EARLY: may be launched before the kernel before it has ended."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1.0)
