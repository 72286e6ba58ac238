"""Calls native kernels immediately, or records them and replays all calls of a step at once.

A kernel called with an `Array` of a `Program` does not compute: its call is appended to the program, and its result is
another array of the program. One ordinary forward pass with such arrays records all kernel calls of a step.

    program = Program(capacity)
    x = program.array((columns,), dtype)
    y = layer(x)                        # recorded
    x.fill(..., 3)
    library.run(program.segment(3))     # computed: y.memory[:3]

An array's memory is reused as soon as the recorded code drops the last reference to the array. Weights and other
arguments of kernels must outlive the program.
"""

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.native import Library
from penstock.native.array import Array, CannotRecordError, dtype_name, dtype_of
from penstock.native.structs import Arguments, Call, Segment


class Program:
    """Native calls on scratch memory of the program, recorded once and run for any number of rows up to `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._calls: list[Call] = []
        self._arguments: list[Arguments] = []  # the calls have their addresses
        self._idle: list[NDArray[Any]] = []
        self._array: "ctypes.Array[Call]" = (Call * 0)()

    def array(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
        """Allocate an array of `capacity` rows of this shape."""
        for index, memory in enumerate(self._idle):
            if (memory.shape[1:], memory.dtype) == (shape, dtype):
                del self._idle[index]
                break
        else:
            memory = np.empty((self._capacity, *shape), dtype)
        recorded = Array(memory, self)
        # Once nothing refers to it: the model's code, which is being recorded, does not say when it uses a result last.
        weakref.finalize(recorded, self._idle.append, memory)
        return recorded

    def add_call(self, arguments: Arguments) -> None:
        """Record a call; `segment` sets the number of rows in its arguments."""
        self._arguments.append(arguments)
        self._calls.append(Call(arguments.operation, ctypes.addressof(arguments)))
        # Made anew at each call: a segment may be asked for between any two, and recording happens once.
        self._array = (Call * len(self._calls))(*self._calls)

    @property
    def num_calls(self) -> int:
        """Number of calls recorded so far."""
        return len(self._calls)

    def segment(self, num_rows: int, first: int = 0, last: int | None = None) -> Segment:
        """The recorded calls over the first `num_rows` rows, for `Library.run`; or those from `first` to `last`."""
        assert 0 < num_rows <= self._capacity
        end = len(self._array) if last is None else last
        return Segment(ctypes.addressof(self._array) + first * ctypes.sizeof(Call), end - first, num_rows)


def memory_of(result: Array) -> Array:
    """The memory of a recorded result.

    Raises:
        CannotRecordError: it was computed at once.
    """
    if result.program is None:
        raise CannotRecordError("a result that does not depend on the step's tokens")
    return result.memory


def empty_rows(like: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array with the row count of `like`, in the same program if `like` is recorded."""
    if not isinstance(like, Array):
        return _empty_tensor(like, shape, dtype)
    dtype = dtype_of(dtype_name(dtype))
    if like.program is not None:
        return like.program.array(shape, dtype)
    return Array(np.empty((len(like), *shape), dtype))


def _empty_tensor(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor of torch, as `like` is one."""
    import torch

    return torch.empty(len(like), *shape, dtype=getattr(torch, dtype_name(dtype)), device=like.device)


def from_host(array: NDArray[Any], like: Array) -> Array:
    """An array of numpy, without a copy."""
    return Array(array)


def on_host(x: Array) -> NDArray[Any]:
    """The content of an array, without a copy.

    Raises:
        CannotRecordError: the array is recorded.
    """
    return x.numpy()


def call(library: Library, x: Array, arguments: Arguments) -> None:
    """Execute an operation over the rows of `x`, or record it if `x` belongs to a program.

    Raises:
        MemoryError: there is no memory for the kernel's intermediate results.
    """
    if (program := getattr(x, "program", None)) is not None:  # a tensor has none
        program.add_call(arguments)
    else:
        call_now(library, len(x), arguments)


def call_now(library: Library, num_rows: int, arguments: Arguments) -> None:
    """Execute an operation over `num_rows` rows. Raises the same error as `call`."""
    made = Call(arguments.operation, ctypes.addressof(arguments))
    library.run(Segment(ctypes.addressof(made), 1, num_rows))
