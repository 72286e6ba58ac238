"""The memory of a model's tensors in torch; `memory.py` has the interfaces."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.dataclass import dataclass
from penstock.kernels.arrays import array_of, tensor_of
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.linear.weight import Packed, Weight
from penstock.kernels.memory import LARGE_BYTES, form_of
from penstock.native.array import dtype_name
from penstock.system.allocator import Allocator


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """See `ModelTensor`."""

    tensor: Tensor
    is_filled: bool = False

    def packed(self) -> Packed:
        return Packed(form_of(self.tensor.shape, dtype_name(self.tensor.dtype)), (_bytes_of(self.tensor),))

    def adopt(self, packed: Packed) -> bool:
        mapped = _unpacked(packed, tuple(self.tensor.shape), self.tensor.dtype)
        if mapped is not None:
            self.tensor.set_(mapped.untyped_storage(), mapped.storage_offset(), mapped.shape, mapped.stride())
        return mapped is not None


def new_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    packed: Packed | None = None,
    *,
    allocator: Allocator,
) -> TorchTensor:
    """See `NewTensor`."""
    dtype = dtype_of(dtype_name(dtype))  # a native weight's biases are asked for in a dtype of numpy
    mapped = None if packed is None else _unpacked(packed, shape, dtype)
    if mapped is not None:
        return TorchTensor(mapped, is_filled=True)
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type == "cpu" and size >= LARGE_BYTES:
        memory = torch.from_numpy(allocator.zeros(size, for_weights=True))
        return TorchTensor(memory.view(dtype).view(shape))
    return TorchTensor(torch.empty(shape, dtype=dtype, device=device))


def dtype_of(name: str) -> torch.dtype:
    """The dtype with this name, which numpy, `ml_dtypes` and torch share."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def constant(values: NDArray[Any], dtype: torch.dtype | None, device: str) -> Tensor:
    """A tensor with these values; `dtype` None: of theirs."""
    return tensor_of(values).to(device, dtype)


def store(target: Weight[Tensor] | Tensor, first: int, rows: NDArray[Any] | Quantized) -> None:
    """See `Store`."""
    if not isinstance(target, Tensor):
        target.load(first, rows)
    else:
        assert not isinstance(rows, Quantized)
        target[first : first + len(rows)].copy_(tensor_of(rows))


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    return array_of(tensor.contiguous().view(-1).view(torch.uint8))


def _unpacked(packed: Packed, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """The inverse of `TorchTensor.packed`, without a copy; None if shape or dtype do not match."""
    size = math.prod(shape) * dtype.itemsize
    if packed.form != form_of(shape, dtype_name(dtype)) or [part.nbytes for part in packed.parts] != [size]:
        return None
    return torch.from_numpy(packed.parts[0]).view(dtype).view(shape)


def empty_rows(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor with the row count of `like`, on its device."""
    return torch.empty(len(like), *shape, dtype=dtype, device=like.device)


def from_host(array: NDArray[Any], like: Tensor) -> Tensor:
    """An array as a tensor on the device of `like`; without a copy if that is the host."""
    tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def on_host(tensor: Tensor) -> NDArray[Any]:
    """A tensor's content as an array; without a copy if it is on the host."""
    array: NDArray[Any] = tensor.numpy() if tensor.is_cpu else tensor.cpu().numpy()
    return array
