"""Small kernels that are wrong, each in one way, for the tests of the sanitizer; and bfloat16 arithmetic.

A launch has two programs, and tensors of 12 elements for the 8 of each.
"""

import triton
import triton.language as tl


@triton.jit
def reads_beyond(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at), mask=at < 12)


@triton.jit
def writes_beyond(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < 12))


@triton.jit
def writes_where_another_did(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def reads_what_another_wrote(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(out + at, tl.load(out + 4 - at % 4))


@triton.jit
def stores_twice(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * 4 + tl.arange(0, SIZE) // 2
    tl.store(out + at, tl.load(x + at))


@triton.jit
def bfloat16_arithmetic(a, b, added, product):
    at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    left = tl.load(a + at)
    right = tl.load(b + at)
    tl.store(added + at, left + right * 1.5)
    tl.store(product + at, tl.dot(left, right))
