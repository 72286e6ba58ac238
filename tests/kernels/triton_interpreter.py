"""Triton's interpreter on the CPU, with bfloat16 as a GPU computes it. Imported before the kernels are.

Triton 3.7 to 3.9 interpret bfloat16 as 16-bit integers: `tl.dot`, `+` and `*` compute with the bit patterns, without an
error (triton-lang/triton#11584). Here a tile's product is summed in float64 and rounded once, so it depends neither on
numpy's BLAS nor on a row's place in the tile.
"""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
_binary, _unary, _cast, _fp_to_fp = Builder.binary_op, Builder.unary_op, Builder.cast_impl, Builder.create_fp_to_fp


def is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def widened(handle: Any) -> NDArray[Any]:
    """The numbers of a handle; bfloat16 as float32."""
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16(handle) else handle.data


def narrowed(numbers: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits in bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def _operand(handle: Any) -> NDArray[Any]:
    if handle.dtype.primitive_bitwidth == 8:
        return interpreter._convert_float(handle.data, handle.dtype, tl.float16, None).view(np.float16)
    return widened(handle)


def dot(builder: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
    kind = np.int64 if a.dtype.is_int() else np.float64
    left, right = (each.data if a.dtype.is_int() else _operand(each) for each in (a, b))
    product = np.matmul(left.astype(kind), right.astype(kind))
    return Handle((product + acc.data).astype(acc.data.dtype), acc.dtype.scalar)


def binary_op(builder: Any, left: Any, right: Any, op: Any) -> Any:
    if not is_bfloat16(left):
        return _binary(builder, left, right, op)
    result = op(widened(left), widened(right))
    return Handle(result, tl.int1) if result.dtype == bool else Handle(narrowed(result), tl.bfloat16)


def unary_op(builder: Any, operand: Any, op: Any) -> Any:
    if not is_bfloat16(operand):
        return _unary(builder, operand, op)
    return Handle(narrowed(op(widened(operand))), tl.bfloat16)


def cast(builder: Any, source: Any, target: Any) -> Any:
    if is_bfloat16(source) and not target.scalar.is_fp8():
        return Handle(widened(source).astype(interpreter._get_np_dtype(target.scalar)), target.scalar)
    if target.scalar == tl.bfloat16:
        return Handle(narrowed(source.data.astype(np.float32)), tl.bfloat16)
    return _cast(builder, source, target)


def fp_to_fp(builder: Any, source: Any, target: Any, mode: Any) -> Any:
    kinds = (source.dtype.scalar, target.scalar)
    if tl.bfloat16 in kinds and all(kind.primitive_bitwidth != 8 for kind in kinds):
        return cast(builder, source, target)
    return _fp_to_fp(builder, source, target, mode)


def get_bf16(builder: Any, number: float) -> Any:
    return Handle(narrowed(np.array([number], np.float32)), tl.bfloat16)


Builder.create_dot, Builder.binary_op, Builder.unary_op = dot, binary_op, unary_op
Builder.cast_impl, Builder.create_fp_to_fp, Builder.get_bf16 = cast, fp_to_fp, get_bf16
