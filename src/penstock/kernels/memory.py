"""The memory of a model's tensors: allocates it, and stores in it what checkpoints hold, which are numpy arrays.

Here are the interfaces, and the arrays of native kernels; `reference_memory.py` has torch's tensors. A weight in a
layout of the kernels' own (`kernels/linear`) has its own memory.
"""

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.dataclass import dataclass
from penstock.kernels.array_types import A_co, A_contra
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.linear.weight import Packed, Weight
from penstock.native.array import AnyDtype, Array, dtype_name, dtype_of
from penstock.system.allocator import Allocator

LARGE_BYTES = 2**16
"""Minimum size of tensors that are allocated from the memory for packed weights, and so lie in their file."""


class ModelTensor(Protocol[A_co]):
    """A tensor that the cache of packed weights can store. See `Packable` for the methods."""

    @property
    def tensor(self) -> A_co: ...

    @property
    def is_filled(self) -> bool:
        """Whether it was made in memory that already holds its content."""
        ...

    def packed(self) -> Packed: ...

    def adopt(self, packed: Packed) -> bool: ...


class NewTensor(Protocol[A_co]):
    """Allocates a tensor, without content unless `packed` has it in this shape and dtype: then in that memory."""

    def __call__(
        self, shape: tuple[int, ...], dtype: AnyDtype, device: str, packed: Packed | None = None
    ) -> ModelTensor[A_co]: ...


class Store(Protocol[A_contra]):
    """Stores rows of a checkpoint in a weight or a tensor, from row `first` on: packed, copied or uploaded.

    They are converted to the target's dtype; a weight of a quantized format takes quantized rows.
    """

    def __call__(self, target: A_contra | Weight[A_contra], first: int, rows: NDArray[Any] | Quantized) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelArray:
    """See `ModelTensor`."""

    tensor: Array
    is_filled: bool = False

    def packed(self) -> Packed:
        content = np.ascontiguousarray(self.tensor.numpy())
        return Packed(form_of(content.shape, content.dtype.name), (content.reshape(-1).view(np.uint8),))

    def adopt(self, packed: Packed) -> bool:
        mapped = _unpacked(packed, self.tensor.shape, self.tensor.dtype)
        if mapped is not None:
            self.tensor.hold(mapped)
        return mapped is not None


def new_array(
    shape: tuple[int, ...],
    dtype: AnyDtype,
    device: str,
    packed: Packed | None = None,
    *,
    allocator: Allocator,
) -> ModelArray:
    """See `NewTensor`."""
    assert str(device) == "cpu"
    dtype = dtype_of(dtype_name(dtype))
    mapped = None if packed is None else _unpacked(packed, shape, dtype)
    if mapped is not None:
        return ModelArray(Array(mapped), is_filled=True)
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE_BYTES:
        return ModelArray(Array(np.empty(shape, dtype)))
    return ModelArray(Array(allocator.zeros(size, for_weights=True).view(dtype).reshape(shape)))


def constant(values: NDArray[Any], dtype: AnyDtype | None, device: str) -> Array:
    """An array with these values; `dtype` None: of theirs."""
    return Array(values if dtype is None else values.astype(dtype_of(dtype_name(dtype)), copy=False))


def store(target: Array | Weight[Array], first: int, rows: NDArray[Any] | Quantized) -> None:
    """See `Store`."""
    if not isinstance(target, Array):
        target.load(first, rows)
    else:
        assert not isinstance(rows, Quantized)
        with np.errstate(all="ignore"):  # numbers that are infinite in the target's dtype
            target.numpy()[first : first + len(rows)] = rows


def form_of(shape: tuple[int, ...], dtype: str) -> str:
    """Identifies the layout of a tensor among packed weights."""
    return f"{dtype} {list(shape)}"


def _unpacked(packed: Packed, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The inverse of `ModelArray.packed`, without a copy; None if shape or dtype do not match."""
    size = math.prod(shape) * dtype.itemsize
    if packed.form != form_of(shape, dtype.name) or [part.nbytes for part in packed.parts] != [size]:
        return None
    return packed.parts[0].view(dtype).reshape(shape)
