"""Arrays that native kernels read and write: memory of numpy, with its address, or an array of a `Program`.

The methods have the names of torch's tensors (`data_ptr`, `stride`, `dim` ...), so kernels also take tensors in host
memory: tests compare them with the reference this way, and the quantizer calibrates with them. Dtypes are numpy's, with
`ml_dtypes` for those that numpy lacks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.native.structs import Arguments

AnyDtype: TypeAlias = Any
"""A dtype of the arrays of a table of operations: of numpy, or with the reference of torch."""
_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in ("float32", "bfloat16", "float16", "int8", "uint8", "int32", "int64")
}
INT64 = _DTYPES["int64"]
"""Dtype of row ids and token ids."""


class CannotRecordError(Exception):
    """A forward pass asked, while it was recorded, for a value that only a step has; the message names it."""


class NoNativeKernelError(ConfigError):
    """An operation, or a size of one, has no native kernel; the message names it. The reference computes it."""


class Recorder(Protocol):
    """Records the calls of a forward pass: a `Program`."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array: ...

    def add_call(self, arguments: Arguments) -> None: ...


class Array:
    """An array in host memory; with a `program`, a result of it: its first axis is the step's rows, and it has no
    content before the program runs. It has no operators: operations are those of `Ops`.
    """

    __slots__ = ("__weakref__", "_address", "_array", "dtype", "program", "shape")

    def __init__(self, array: NDArray[Any], program: Recorder | None = None) -> None:
        self.program = program
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype[Any] = array.dtype
        self.hold(array)

    def hold(self, array: NDArray[Any]) -> None:
        """Use other memory of the same content instead."""
        self._array = array
        self._address: int = array.__array_interface__["data"][0]  # `ctypes.data` is slower

    @property
    def memory(self) -> Array:
        """The memory of a recorded array, as an array of no program."""
        return Array(self._array)

    def numpy(self) -> NDArray[Any]:
        """The content, without a copy.

        Raises:
            CannotRecordError: the array is recorded.
        """
        if self.program is not None:
            raise CannotRecordError("the content of a result of the step")
        return self._array

    def fill(self, content: ArrayLike, count: int) -> None:
        """Copy the first `count` rows of the content into the memory."""
        self._array[:count] = content

    @property
    def nbytes(self) -> int:
        """Size in bytes, without gaps between rows."""
        return self._array.nbytes

    def __len__(self) -> int:
        return len(self._array)

    def dim(self) -> int:
        """Number of axes."""
        return self._array.ndim

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self._address

    def stride(self, axis: int) -> int:
        """Distance in elements between neighbours along an axis."""
        if not self._array.size:  # numpy's strides are 0 then
            return math.prod(max(1, length) for length in self.shape[axis + 1 :])
        return self._array.strides[axis] // self._array.itemsize

    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another, in the order of the axes."""
        return self._array.flags.c_contiguous

    def view(self, *shape: int) -> Array:
        """The same elements in another shape; the array must be contiguous."""
        assert self.is_contiguous()
        return Array(self.numpy().reshape(shape))

    def __getitem__(self, rows: slice | int) -> Array:
        return Array(self.numpy()[rows])

    if not TYPE_CHECKING:  # a family of one's own may compute in torch: then the reference computes all of it

        def __getattr__(self, name: str) -> object:
            raise AttributeError(name) if name.startswith("__") else NoNativeKernelError(name)

        @classmethod
        def __torch_function__(cls, func: Any, *arguments: Any) -> object:
            raise NoNativeKernelError(func.__name__)

        def __mul__(self, other: object) -> object:
            raise NoNativeKernelError("arithmetic on tensors, such as multiplication")

        __add__ = __radd__ = __sub__ = __rsub__ = __rmul__ = __truediv__ = __rtruediv__ = __mul__


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype with this name, which numpy, `ml_dtypes` and torch share."""
    return _DTYPES[name]


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of numpy or torch."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
