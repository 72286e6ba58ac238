"""Calls native kernels immediately, or records them and replays all calls of a step at once.

A kernel called with a `RecordedTensor` of a `Program` does not compute: its call is appended to the program, and its
result is another `RecordedTensor`. One ordinary forward pass with such tensors records all kernel calls of a step.

    program = Program(capacity)
    x = program.tensor((columns,), dtype)
    y = layer(x)                        # recorded
    x.memory[:3] = ...
    library.run(program.segment(3))     # computed: y.memory[:3]

A tensor's memory is reused as soon as the recorded code drops the last reference to the tensor. Weights and other
arguments of kernels must outlive the program.
"""

import ctypes
import functools
import weakref
from typing import Any

import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from penstock.native import Library
from penstock.native.structs import Arguments, Call, Segment


class CannotRecordError(Exception):
    """An operation without a native kernel was called with a recorded tensor; the message names the operation."""


class RecordedTensor(Tensor):
    """A tensor of a program, its first axis the step's rows. It has no content before the program runs, so that torch
    cannot compute with it: an operation without a native kernel raises CannotRecordError.
    """

    program: "Program"
    memory: Tensor
    """Memory of the content."""

    def fill(self, content: ArrayLike, count: int) -> None:
        """Copy the first `count` rows of the content into the memory."""
        self._array[:count] = content

    @functools.cached_property
    def _array(self) -> NDArray[Any]:
        return self.memory.numpy()  # a copy by numpy costs a third of one by torch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PROPERTIES:
            raise CannotRecordError(getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_PROPERTIES: frozenset[Any] = frozenset(
    [Tensor.__len__, Tensor.data_ptr, Tensor.dim, Tensor.is_contiguous, Tensor.stride]
    + [getattr(Tensor, name).__get__ for name in ("dtype", "is_cpu", "shape")]
)


class Program:
    """Native calls on scratch memory of the program, recorded once and run for any number of rows up to `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._calls: list[Call] = []
        self._arguments: list[Arguments] = []  # the calls have their addresses
        self._idle: list[Tensor] = []
        self._array: "ctypes.Array[Call]" = (Call * 0)()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> RecordedTensor:
        """Allocate a tensor of `capacity` rows of this shape."""
        for index, memory in enumerate(self._idle):
            if (memory.shape[1:], memory.dtype) == (shape, dtype):
                del self._idle[index]
                break
        else:
            memory = torch.empty(self._capacity, *shape, dtype=dtype)
        recorded = memory.as_subclass(RecordedTensor)
        recorded.program, recorded.memory = self, memory
        weakref.finalize(recorded, self._idle.append, memory)
        return recorded

    def add_call(self, arguments: Arguments) -> None:
        """Record a call; `segment` sets the number of rows in its arguments."""
        self._arguments.append(arguments)
        self._calls.append(Call(arguments.operation, ctypes.addressof(arguments)))
        self._array = (Call * len(self._calls))(*self._calls)

    def segment(self, num_rows: int) -> Segment:
        """The recorded calls over the first `num_rows` rows, for `Library.run`."""
        assert 0 < num_rows <= self._capacity
        return Segment(ctypes.addressof(self._array), len(self._array), num_rows)


def memory_of(result: Tensor) -> Tensor:
    """The memory of a recorded result.

    Raises:
        CannotRecordError: it was computed at once.
    """
    if not isinstance(result, RecordedTensor):
        raise CannotRecordError("a result that does not depend on the step's tokens")
    return result.memory


def empty_rows(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor with the row count of `like`, in the same program if `like` is recorded."""
    if isinstance(like, RecordedTensor):
        return like.program.tensor(shape, dtype)
    return torch.empty(len(like), *shape, dtype=dtype, device=like.device)


def from_host(array: NDArray[Any], like: Tensor) -> Tensor:
    """An array as a tensor on the device of `like`; without a copy if that is the host."""
    tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def on_host(tensor: Tensor) -> NDArray[Any]:
    """A tensor's content as an array; without a copy if it is on the host."""
    array: NDArray[Any] = tensor.numpy() if tensor.is_cpu else tensor.cpu().numpy()
    return array


def call(library: Library, x: Tensor, arguments: Arguments) -> None:
    """Execute an operation over the rows of `x`, or record it if `x` belongs to a program.

    Raises:
        MemoryError: there is no memory for the kernel's intermediate results.
    """
    if isinstance(x, RecordedTensor):
        x.program.add_call(arguments)
    else:
        call_now(library, len(x), arguments)


def call_now(library: Library, num_rows: int, arguments: Arguments) -> None:
    """Execute an operation over `num_rows` rows. Raises the same error as `call`."""
    made = Call(arguments.operation, ctypes.addressof(arguments))
    library.run(Segment(ctypes.addressof(made), 1, num_rows))
