"""Reads safetensors files by views of a mapping, without the package: the format is a length, a header and bytes.

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype": .., "shape": [..], "data_offsets": [first, last]}, ..}
    the rest  the tensors' bytes, without gaps; offsets count from its beginning

A file comes from strangers: its header is bounded, and each tensor's bytes must lie within the file, be as many as its
shape requires and belong to no other tensor. Source: https://github.com/huggingface/safetensors.
"""

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

if TYPE_CHECKING:  # facts of a checkpoint are read before numpy is imported
    import numpy as np
    from numpy.typing import NDArray

_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 32 * 2**20
_MAX_DIMENSIONS = 16
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits per element of the format's types."""
_NUMPY_TYPES = {
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
"""Types that numpy lacks, by their names in `ml_dtypes`."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's type, shape and place in its file."""

    dtype: str
    """In the format's words, such as BF16."""
    shape: tuple[int, ...]
    first: int
    """Offset of its first byte in the file."""
    last: int
    """Offset after its last byte."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name.

    Raises:
        CheckpointError: the file is damaged, truncated or no safetensors file, or its header is too large.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer instead of the weights; fetch them with `git lfs pull`"
                )
            length = int.from_bytes(start[:8], "little")
            if len(start) < 8 or length > size - 8:
                raise _damaged(path, f"its header of {length} bytes is longer than the file")
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} has a header of {length} bytes; the limit is {_MAX_HEADER_BYTES}, enough for 200,000 "
                    "tensors"
                )
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise _damaged(path, str(error)) from error
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read ({error})") from None
    _check_places(path, tensors, 8 + length, size)
    return tensors


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or truncated: {reason}")


def _tensor(entry: Mapping[str, Any], start: int) -> StoredTensor:
    """
    Raises:
        ValueError, LookupError, TypeError: the entry is not that of a tensor.
    """
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _BITS:
        raise ValueError(f"unknown type {shown(dtype)}")
    numbers = [*shape, first, last]
    if len(shape) > _MAX_DIMENSIONS or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"wrong shape {shown(shape)} or offsets {shown(entry['data_offsets'])}")
    bits = math.prod(shape) * _BITS[dtype]
    if first > last or bits != 8 * (last - first):
        raise ValueError(f"{last - first} bytes for the shape {shown(shape)} of {dtype}")
    return StoredTensor(dtype, tuple(shape), start + first, start + last)


def _check_places(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """
    Raises:
        CheckpointError: tensors overlap, bytes belong to none, or one lies beyond the file's end.
    """
    place = start
    for first, last, name in sorted((tensor.first, tensor.last, name) for name, tensor in tensors.items()):
        if last > size:
            raise _damaged(path, f"{shown(name)} lies beyond its end")
        if first != place:
            raise _damaged(path, f"{shown(name)} {'overlaps another tensor' if first < place else 'follows a gap'}")
        place = last
    if place != size:
        raise _damaged(path, f"{size - place} of its bytes belong to no tensor")


class MappedTensors:
    """The tensors of a mapped file, as arrays that share its memory. They are never written.

    The mapping lasts as long as any of the arrays.
    """

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        """
        Args:
            tensors: the file's header.

        Raises:
            CheckpointError: the file cannot be mapped, or has become shorter since its header was read.
        """
        import numpy as np

        try:
            with path.open("rb") as file:
                # private, so that torch takes it, which has no read-only memory
                self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise _damaged(path, str(error)) from error
        if any(tensor.last > len(self._bytes) for tensor in tensors.values()):
            raise _damaged(path, "it has become shorter")
        self._tensors = tensors

    def bytes_of(self, name: str) -> "NDArray[np.uint8]":
        """A tensor's bytes."""
        tensor = self._tensors[name]
        return self._bytes[tensor.first : tensor.last]

    def read(self, name: str, first: int | None = None, last: int | None = None) -> "NDArray[Any]":
        """A tensor, or its rows `first` to `last` (exclusive); one without dimensions is an array of one number.

        Raises:
            CheckpointError: it has a type that is not supported; the caller puts the tensor's name before the message.
        """
        import numpy as np

        tensor = self._tensors[name]
        dtype = numpy_type(tensor.dtype)
        rows = self.bytes_of(name).view(dtype).reshape(tensor.shape or (1,))[first:last]
        return rows if rows.flags.aligned else np.copy(rows)


def numpy_type(dtype: str) -> "np.dtype[Any]":
    """The numpy type of one of the format's types.

    Raises:
        CheckpointError: it is not supported; the caller puts the tensor's name before the message.
    """
    import ml_dtypes
    import numpy as np

    if dtype not in _NUMPY_TYPES | _ML_DTYPES:
        known = ", ".join([*_NUMPY_TYPES, *_ML_DTYPES])
        raise CheckpointError(f"has the type {dtype}, which is not supported; supported: {known}")
    found: np.dtype[Any] = np.dtype(_NUMPY_TYPES.get(dtype) or getattr(ml_dtypes, _ML_DTYPES[dtype]))
    return found
