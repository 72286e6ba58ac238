"""Calls of the native kernels: made at once, or recorded and made again, all of a step's by one call.

A kernel that is given `Rows` of a `Program` does not compute: its call goes into the program, and what it returns are
`Rows` again. So the ordinary forward pass, taken once with such tensors, writes down what a step is made of.

    program = Program(capacity)
    x = program.rows((columns,), dtype)
    y = layer(x)                # recorded
    x.memory[:3] = ...
    run(program.section(3))     # computed: y.memory[:3]

Memory is used again as soon as the recorded code has dropped the last reference to what was in it. Weights and all
else that a kernel was given must live as long as the program.
"""

import ctypes
import enum
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from penstock import native


class Operation(enum.IntEnum):
    """`Operation` of `csrc/ops.h`."""

    LINEAR = 0
    ATTENTION = 1
    ROTATE_AND_STORE = 2
    RMS_NORM = 3
    UNPACK = 4
    GATHER = 5
    SCALE = 6


class _Call(ctypes.Structure):
    """`Call` of `csrc/ops.h`."""

    _fields_ = (("operation", ctypes.c_int64), ("arguments", ctypes.c_void_p))


class Section(ctypes.Structure):
    """`Section` of `csrc/ops.h`: a program's calls over so many rows."""

    _fields_ = (("calls", ctypes.c_void_p), ("count", ctypes.c_int64), ("rows", ctypes.c_int64))


class Rows(Tensor):
    """A tensor of a program, its first axis the rows. It has no content before the program runs, so torch has no use
    for it: an operation without a native kernel raises TypeError.
    """

    program: "Program"
    memory: Tensor
    """Where the content will be."""

    def fill(self, content: ArrayLike, count: int) -> None:
        """Put the content of the first `count` rows into the memory."""
        self._array[:count] = content

    @functools.cached_property
    def _array(self) -> NDArray[Any]:
        return self.memory.numpy()  # a copy by numpy costs a third of one by torch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PROPERTIES:
            raise TypeError(f"{func.__name__} is not a native kernel: it cannot be recorded")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_PROPERTIES: frozenset[Any] = frozenset(
    [Tensor.__len__, Tensor.data_ptr, Tensor.dim, Tensor.is_contiguous, Tensor.stride]
    + [getattr(Tensor, name).__get__ for name in ("dtype", "is_cpu", "shape")]
)


class Program:
    """Native calls on memory of their own, recorded once and run for any number of rows up to `capacity`.

    `backed` memory is written to at once: the first run of many rows need not wait until the system has found it.
    """

    def __init__(self, capacity: int, *, backed: bool = False) -> None:
        self._capacity, self._backed = capacity, backed
        self._calls: list[_Call] = []
        self._arguments: list[ctypes.Structure] = []  # the calls have their addresses
        self._idle: list[Tensor] = []
        self._array: "ctypes.Array[_Call]" = (_Call * 0)()

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> Rows:
        """Memory for `capacity` rows of this shape."""
        for index, memory in enumerate(self._idle):
            if (memory.shape[1:], memory.dtype) == (shape, dtype):
                del self._idle[index]
                break
        else:
            memory = torch.empty(self._capacity, *shape, dtype=dtype)
            if self._backed:
                memory.zero_()
        rows = memory.as_subclass(Rows)
        rows.program, rows.memory = self, memory
        weakref.finalize(rows, self._idle.append, memory)
        return rows

    def add(self, operation: Operation, arguments: ctypes.Structure) -> None:
        """Record a call; the number of rows in its arguments is ignored."""
        self._arguments.append(arguments)
        self._calls.append(_Call(operation, ctypes.addressof(arguments)))
        self._array = (_Call * len(self._calls))(*self._calls)

    def section(self, num_rows: int) -> Section:
        """The recorded calls over the first `num_rows` rows, for `run`."""
        assert 0 < num_rows <= self._capacity
        return Section(ctypes.addressof(self._array), len(self._array), num_rows)


def run(*sections: Section) -> None:
    """Make the calls of these sections, one after another.

    Raises:
        MemoryError: there is no memory for the kernels' intermediate results.
    """
    if _function()((Section * len(sections))(*sections), len(sections)):
        most = max(section.rows for section in sections)
        raise MemoryError(f"no memory for the intermediate results of {most} tokens")


def empty_rows(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of as many rows as `like` has, each of this shape, and of the program that `like` is of, if any."""
    if isinstance(like, Rows):
        return like.program.rows(shape, dtype)
    return torch.empty(len(like), *shape, dtype=dtype)


def call(x: Tensor, operation: Operation, arguments: ctypes.Structure) -> None:
    """Make a call over the rows of `x`, or record it where `x` is of a program.

    Raises:
        MemoryError: there is no memory for the kernel's intermediate results.
    """
    if isinstance(x, Rows):
        x.program.add(operation, arguments)
    else:
        made = _Call(operation, ctypes.addressof(arguments))
        run(Section(ctypes.addressof(made), 1, len(x)))


@functools.cache
def _function() -> "Callable[[ctypes.Array[Section], int], int]":
    library = native.library()
    assert library is not None
    return library.function("penstock_run", "pl", ctypes.c_int32)
