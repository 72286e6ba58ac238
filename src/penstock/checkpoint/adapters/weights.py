"""An adapter's safetensors file, checked before the engine reads it. No torch."""

import json
import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from penstock.config.model_facts import DType
from penstock.errors import AdapterError, shown

WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_HEADER_BYTES = 32 * 2**20
_PIECE = 2**20
"""Bytes checked at a time."""
_TYPES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes per element, by dtype."""
_BEYOND: dict[DType, dict[str, int]] = {
    "float32": {"F32": 0x7F80_0000, "BF16": 0x7F80, "F16": 0x7C00},
    "bfloat16": {"F32": 0x7F7F_8000, "BF16": 0x7F80, "F16": 0x7C00},
    "float16": {"F32": 0x477F_F000, "BF16": 0x4780, "F16": 0x7C00},
}
"""Bits, without the sign, of the smallest number that becomes infinite, by the model's and the adapter's dtype."""


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a safetensors file's tensors.

    Raises:
        AdapterError: the file is damaged, or has tensors of other types.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise AdapterError(f"{WEIGHTS_FILE} is damaged or cut short")
        try:
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            _check_spans(header, size - 8 - length)
            shapes = {name: _shape(name, of) for name, of in header.items()}
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise AdapterError(f"{WEIGHTS_FILE} is damaged: its header cannot be read") from None
    try:
        with safe_open(file, framework="numpy"):  # as the engine will read it
            return shapes
    except SafetensorError as error:
        raise AdapterError(f"{WEIGHTS_FILE} is damaged: {error}") from None


def _check_spans(header: Mapping[str, Mapping[str, Any]], size: int) -> None:
    """
    Raises:
        AdapterError: two tensors overlap, or one lies outside of the file's data.
    """
    place = 0
    for (begin, end), name in sorted((of["data_offsets"], name) for name, of in header.items()):
        if not place <= begin <= end <= size:
            fault = "lies beyond its end" if end > size else "overlaps another tensor"
            raise AdapterError(f"{WEIGHTS_FILE} is damaged or cut short: {name} {fault}")
        place = end


def _shape(name: str, of: Mapping[str, Any]) -> tuple[int, ...]:
    if of["dtype"] not in _TYPES:
        raise AdapterError(f"{name} is of type {shown(of['dtype'])}; {', '.join(_TYPES)} are supported")
    begin, end = of["data_offsets"]
    shape = tuple(map(operator.index, of["shape"]))
    if math.prod(shape) * _TYPES[of["dtype"]] != end - begin:
        raise AdapterError(f"{WEIGHTS_FILE} is damaged: {name} has {end - begin} bytes, not those of {shown(shape)}")
    return shape


def check_finite(file: Path, dtype: DType) -> None:
    """Check the values of a file that `tensor_shapes` has read.

    Raises:
        AdapterError: a weight is NaN, infinite, or too large for `dtype`.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, of in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = of["data_offsets"]
            opened.seek(8 + length + begin)
            beyond = _BEYOND[dtype][of["dtype"]]
            if any(piece >= beyond for piece in _magnitudes(opened, end - begin, _TYPES[of["dtype"]])):
                raise AdapterError(f"{name} has weights that are NaN, infinite or too large for {dtype}")


def _magnitudes(opened: BinaryIO, size: int, width: int) -> Iterator[int]:
    """The largest bits, without the sign, of each piece of the next `size` bytes."""
    for first in range(0, size, _PIECE):
        bits = np.frombuffer(opened.read(min(_PIECE, size - first)), np.uint32 if width == 4 else np.uint16)
        yield int((bits & (2 ** (8 * width - 1) - 1)).max(initial=0))
