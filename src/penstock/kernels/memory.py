"""The memory of a model's tensors: allocates it, and stores in it what checkpoints hold, which are numpy arrays.

A weight in a layout of the kernels' own (`kernels/linear`) has its own memory.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.arrays import array_of, tensor_of
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.linear.weight import Packed, Weight
from penstock.system.allocator import Allocator

_LARGE_BYTES = 2**16
"""Minimum size of tensors that are allocated from the memory for packed weights, and so lie in their file."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor that the cache of packed weights can store. See `Packable` for the methods."""

    tensor: Tensor
    is_filled: bool = False
    """Whether it was made in memory that already holds its content."""

    def packed(self) -> Packed:
        return Packed(_form(self.tensor.shape, self.tensor.dtype), (_bytes_of(self.tensor),))

    def adopt(self, packed: Packed) -> bool:
        mapped = _unpacked(packed, tuple(self.tensor.shape), self.tensor.dtype)
        if mapped is not None:
            self.tensor.set_(mapped.untyped_storage(), mapped.storage_offset(), mapped.shape, mapped.stride())
        return mapped is not None


class NewTensor(Protocol):
    """Allocates a tensor, without content unless `packed` has it in this shape and dtype: then in that memory."""

    def __call__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, packed: Packed | None = None
    ) -> ModelTensor: ...


class Store(Protocol):
    """Stores rows of a checkpoint in a weight or a tensor, from row `first` on: packed, copied or uploaded.

    They are converted to the target's dtype; a weight of a quantized format takes quantized rows.
    """

    def __call__(self, target: Weight | Tensor, first: int, rows: NDArray[Any] | Quantized) -> None: ...


def new_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    packed: Packed | None = None,
    *,
    allocator: Allocator,
) -> ModelTensor:
    """See `NewTensor`."""
    mapped = None if packed is None else _unpacked(packed, shape, dtype)
    if mapped is not None:
        return ModelTensor(mapped, is_filled=True)
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and size >= _LARGE_BYTES:
        memory = torch.from_numpy(allocator.zeros(size, for_weights=True))
        return ModelTensor(memory.view(dtype).view(shape))
    return ModelTensor(torch.empty(shape, dtype=dtype, device=device))


def dtype_of(name: str) -> torch.dtype:
    """The dtype with this name, which numpy, `ml_dtypes` and torch share."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def constant(values: NDArray[Any], dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """A tensor with these values; `dtype` None: of theirs."""
    return tensor_of(values).to(device, dtype)


def store(target: Weight | Tensor, first: int, rows: NDArray[Any] | Quantized) -> None:
    """See `Store`."""
    if not isinstance(target, Tensor):
        target.load(first, rows)
    else:
        assert not isinstance(rows, Quantized)
        target[first : first + len(rows)].copy_(tensor_of(rows))


def _form(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{dtype} {list(shape)}"


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    return array_of(tensor.contiguous().view(-1).view(torch.uint8))


def _unpacked(packed: Packed, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """The inverse of `ModelTensor.packed`, without a copy; None if shape or dtype do not match."""
    size = math.prod(shape) * dtype.itemsize
    if packed.form != _form(shape, dtype) or [part.nbytes for part in packed.parts] != [size]:
        return None
    return torch.from_numpy(packed.parts[0]).view(dtype).view(shape)
