"""An adapter's safetensors file, checked before the engine reads it. No torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.float_bits import INFINITY, largest_magnitude
from penstock.checkpoint.safetensors import StoredTensor, numpy_type, read_header
from penstock.config.model_facts import DType
from penstock.errors import AdapterError, shown

WEIGHTS_FILE = "adapter_model.safetensors"
_TYPES = ("F32", "BF16", "F16")
_PIECE = 2**20
"""Bytes checked at a time."""
_BEYOND: dict[DType, dict[str, int]] = {
    "float32": INFINITY,
    "bfloat16": INFINITY | {"float32": 0x7F7F_8000},
    "float16": INFINITY | {"float32": 0x477F_F000, "bfloat16": 0x4780},
}
"""Bits, without the sign, of the smallest number that becomes infinite, by the model's and the adapter's dtype."""


def read_adapter_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of an adapter's safetensors file.

    Raises:
        CheckpointError: the file is damaged.
        AdapterError: it has tensors of other types.
    """
    tensors = read_header(file)
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES:
            raise AdapterError(f"{name} is of type {shown(tensor.dtype)}; {', '.join(_TYPES)} are supported")
    return tensors


def check_finite(file: Path, tensors: Mapping[str, StoredTensor], dtype: DType) -> None:
    """
    Raises:
        AdapterError: a weight is NaN, infinite, or too large for `dtype`.
    """
    with file.open("rb") as opened:
        for name in sorted(tensors, key=lambda name: tensors[name].first):
            for values in _pieces(opened, tensors[name]):
                check_values(name, values, dtype)


def check_values(name: str, values: "NDArray[Any]", dtype: DType) -> None:
    """
    Raises:
        AdapterError: a weight is NaN, infinite, or too large for `dtype`.
    """
    if largest_magnitude(values) >= _BEYOND[dtype][values.dtype.name]:
        raise AdapterError(f"{name} has weights that are NaN, infinite or too large for {dtype}")


def _pieces(opened: BinaryIO, tensor: StoredTensor) -> Iterator["NDArray[Any]"]:
    """Read a tensor piece by piece: of a mapped file that becomes shorter, the server would die."""
    opened.seek(tensor.first)
    for first in range(tensor.first, tensor.last, _PIECE):
        content = opened.read(min(_PIECE, tensor.last - first))
        if len(content) < min(_PIECE, tensor.last - first):
            raise AdapterError(f"{WEIGHTS_FILE} has become shorter while it was read")
        yield np.frombuffer(content, numpy_type(tensor.dtype))
