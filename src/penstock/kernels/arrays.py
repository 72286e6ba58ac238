"""Numpy arrays as torch tensors and back, sharing memory. Types that numpy lacks are those of `ml_dtypes`."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
}
"""Types of `ml_dtypes`, and the type that both libraries have for their bits."""


def tensor_of(array: "NDArray[Any]") -> Tensor:
    """The array as a tensor in host memory; a read-only array is copied."""
    if not array.flags.writeable:
        array = array.copy()
    name = array.dtype.name
    if name not in _BITS:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_BITS[name])).view(getattr(torch, name))


def array_of(tensor: Tensor) -> "NDArray[Any]":
    """The tensor, which must be in host memory, as an array."""
    name = str(tensor.dtype).removeprefix("torch.")
    array: NDArray[Any]
    if name not in _BITS:
        array = tensor.numpy()
        return array
    array = tensor.view(getattr(torch, _BITS[name])).numpy()
    return array.view(np.dtype(getattr(ml_dtypes, name)))
