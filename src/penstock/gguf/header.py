"""The header of a GGUF file: metadata and where the tensors lie. Version 2 and 3, little-endian.

    "GGUF" | version | number of tensors | number of metadata entries
    metadata     key | type | value                                       an entry
    tensors      name | dimensions, columns first | type | offset         a tensor
    padding to general.alignment, then the tensors' data

The file is taken for hostile or damaged: every length and count is checked against what is left of the file, and
against bounds far beyond any model in use, before anything of its size is read or made. The reader of the package
`gguf` has no such bounds, and takes seconds for a vocabulary; the tests hold this one to it.
"""

import math
import mmap
import os
import stat
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from penstock.errors import CheckpointError, shown
from penstock.gguf.types import TensorType, tensor_type

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 64 * 2**20
"""The largest in use have 20 MB."""
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**16
_MAX_ARRAY = 2**20
"""Elements; vocabularies have up to 262,144 tokens and twice as many merges."""
_MAX_NAME_BYTES = 2**16
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**20

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Of numbers, by their type's id."""
_NUMBERS = {type_id: struct.Struct("<" + code) for type_id, code in _FORMATS.items()}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_UINT32, _UINT64 = _NUMBERS[4], _NUMBERS[10]


class StringArray:
    """An array of strings, decoded when they are asked for: a vocabulary takes a tenth of a second."""

    __slots__ = ("_content", "_firsts")

    def __init__(self, content: bytes, firsts: "array[int]") -> None:
        """
        Args:
            firsts: where in `content` each string's length begins, which takes 8 bytes; at the end where the last ends.
        """
        self._content, self._firsts = content, firsts

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def decode(self) -> list[str]:
        """
        Raises:
            UnicodeDecodeError: one of them is no UTF-8.
        """
        content = self._content
        return [content[first + 8 : last].decode() for first, last in pairwise(self._firsts)]

    def pick(self, indices: Iterable[int]) -> dict[int, str]:
        """Some of them, by their index, in the order of these; those that there are. Raises as `decode` does."""
        content, firsts, count = self._content, self._firsts, len(self)
        there = sorted(index for index in indices if index < count)
        return {index: content[firsts[index] + 8 : firsts[index + 1]].decode() for index in there}


Value: TypeAlias = "bool | int | float | str | StringArray | array[Any]"
"""Of a metadata entry; an array of truth values is one of type B."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies."""

    file: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]
    """Rows first; the last are the columns, whose blocks lie one after another."""
    first: int
    """Its first byte in the file."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block_columns * self.type.block_bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What comes before the tensors' data."""

    file: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """Read a file's header.

    Raises:
        CheckpointError: it is no GGUF file, of another version, damaged, cut short or larger than any in use.
    """
    with _mapped(file) as content:
        cursor = _Cursor(file, content)
        num_tensors, num_entries = _read_start(cursor)
        metadata = _read_metadata(cursor, num_entries)
        entries = [_read_tensor(cursor) for _ in range(num_tensors)]
        alignment = _alignment(file, metadata)
        data = -(-cursor.at // alignment) * alignment
        return Header(file, metadata, _place_tensors(file, entries, data, alignment, len(content)))


@contextmanager
def _mapped(file: Path) -> Iterator[memoryview]:
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{file} is not a regular file")
            if status.st_size < 24:
                raise CheckpointError(f"{file} is no GGUF file: it has {status.st_size} bytes")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
                yield content
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


class _Cursor:
    """Reads a header from front to back, and never past its end."""

    def __init__(self, file: Path, content: memoryview) -> None:
        self.file, self._content, self.at = file, content, 0
        self._end = min(len(content), _MAX_HEADER_BYTES)

    def take(self, size: int) -> int:
        """Where the next `size` bytes begin; they are behind the cursor then."""
        first = self.at
        if size > self._end - first:
            self.fail_at_end()
        self.at = first + size
        return first

    def fail_at_end(self) -> NoReturn:
        if self._end < len(self._content):
            raise CheckpointError(
                f"{self.file} has a header of more than {_MAX_HEADER_BYTES} bytes, the most that is read of one"
            )
        raise CheckpointError(f"{self.file} is damaged or cut short: its header goes on past the end of the file")

    def bytes(self, size: int) -> bytes:
        first = self.take(size)
        return bytes(self._content[first : first + size])

    def number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self._content, self.take(form.size))[0]

    def count(self, what: str, most: int) -> int:
        """A number of things that follow."""
        count: int = self.number(_UINT64)
        if count > most:
            raise CheckpointError(f"{self.file} is damaged: it names {count} {what}; at most {most} are read")
        return count

    def text(self, what: str, max_bytes: int = _MAX_HEADER_BYTES) -> str:
        size: int = self.number(_UINT64)
        if size > max_bytes:
            raise CheckpointError(f"{self.file} is damaged: {what} has {size} bytes; at most {max_bytes} are read")
        try:
            return self.bytes(size).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file} is damaged: {what} is no UTF-8: {error}") from error

    def strings(self, count: int) -> StringArray:
        """An array of strings; only their lengths are read."""
        first = at = self.at
        end, content, unpack = self._end, self._content, _UINT64.unpack_from
        firsts = array("Q", [0])
        for _ in range(count):  # no call more than needed: there are hundreds of thousands
            if at + 8 > end:
                self.fail_at_end()
            at += 8 + unpack(content, at)[0]
            if at > end:
                self.fail_at_end()
            firsts.append(at - first)
        self.take(at - first)
        return StringArray(bytes(content[first:at]), firsts)


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of metadata entries."""
    if cursor.bytes(4) != _MAGIC:
        raise CheckpointError(f"{cursor.file} is no GGUF file: it does not begin with {_MAGIC.decode()}")
    version = cursor.number(_UINT32)
    if version not in _VERSIONS:
        if version and version & 0xFFFF == 0:
            raise CheckpointError(f"{cursor.file} is a big-endian GGUF file; only little-endian ones are read")
        raise CheckpointError(f"{cursor.file} is of version {version} of GGUF; versions 2 and 3 are read")
    return cursor.count("tensors", _MAX_TENSORS), cursor.count("metadata entries", _MAX_ENTRIES)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", _MAX_NAME_BYTES)
        if key in metadata:
            raise CheckpointError(f"{cursor.file} is damaged: it has the metadata key {shown(key)} twice")
        metadata[key] = _read_value(cursor, key, cursor.number(_UINT32))
    return metadata


def _read_value(cursor: _Cursor, key: str, type_id: int) -> Value:
    if type_id in _NUMBERS:
        value: Value = cursor.number(_NUMBERS[type_id])
        return value
    if type_id == _BOOL:
        return _truth(cursor, key, cursor.bytes(1)) == b"\x01"
    if type_id == _STRING:
        return cursor.text(f"the metadata entry {shown(key)}")
    if type_id == _ARRAY:
        return _read_array(cursor, key)
    raise CheckpointError(f"{cursor.file} is damaged: the metadata entry {shown(key)} is of an unknown type, {type_id}")


def _read_array(cursor: _Cursor, key: str) -> Value:
    type_id = cursor.number(_UINT32)
    count = cursor.count(f"elements of the metadata entry {shown(key)}", _MAX_ARRAY)
    if type_id == _STRING:
        return cursor.strings(count)
    if type_id == _BOOL:
        return array("B", _truth(cursor, key, cursor.bytes(count)))
    if type_id not in _NUMBERS:
        raise CheckpointError(
            f"{cursor.file} is damaged or not supported: the metadata entry {shown(key)} is an array of type {type_id}"
        )
    numbers = array(_FORMATS[type_id], cursor.bytes(count * _NUMBERS[type_id].size))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _truth(cursor: _Cursor, key: str, content: bytes) -> bytes:
    if content.strip(b"\x00\x01"):
        raise CheckpointError(f"{cursor.file} is damaged: the metadata entry {shown(key)} is neither true nor false")
    return content


def _alignment(file: Path, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    whole = alignment if isinstance(alignment, int) and not isinstance(alignment, bool) else 0
    if not 8 <= whole <= _MAX_ALIGNMENT or whole & (whole - 1):
        raise CheckpointError(
            f"{file} is damaged: general.alignment must be a power of two from 8 to {_MAX_ALIGNMENT}, "
            f"not {shown(alignment)}"
        )
    return whole


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type's id, offset in the data)."""
    name = cursor.text("a tensor's name", _MAX_NAME_BYTES)
    num_dimensions = cursor.number(_UINT32)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(
            f"{cursor.file} is damaged: the tensor {shown(name)} has {num_dimensions} dimensions, not 1 to "
            f"{_MAX_DIMENSIONS}"
        )
    shape = tuple(cursor.number(_UINT64) for _ in range(num_dimensions))[::-1]
    return name, shape, cursor.number(_UINT32), cursor.number(_UINT64)


def _place_tensors(
    file: Path, entries: list[tuple[str, tuple[int, ...], int, int]], data: int, alignment: int, file_bytes: int
) -> dict[str, TensorInfo]:
    """Tensors by name; none reaches beyond the file or into another."""
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{file} is damaged: it has the tensor {shown(name)} twice")
        info = TensorInfo(file, name, _known_type(file, name, type_id), shape, data + offset)
        _check_place(info, offset % alignment == 0, file_bytes)
        tensors[name] = info
    end, before = data, ""
    for info in sorted(tensors.values(), key=lambda tensor: tensor.first):
        if info.first < end:
            raise CheckpointError(
                f"{file} is damaged: the tensors {shown(before)} and {shown(info.name)} share bytes of the file"
            )
        end, before = info.first + info.nbytes, info.name
    return tensors


def _known_type(file: Path, name: str, type_id: int) -> TensorType:
    known = tensor_type(type_id)
    if known is None:
        raise CheckpointError(
            f"{file} is damaged or too new: its tensor {shown(name)} is of an unknown type, {type_id}"
        )
    return known


def _check_place(info: TensorInfo, aligned: bool, file_bytes: int) -> None:
    what = f"{info.file} is damaged: its tensor {shown(info.name)}"
    if not all(info.shape):
        raise CheckpointError(f"{what} has the shape {list(info.shape)}")
    if info.shape[-1] % info.type.block_columns:
        raise CheckpointError(
            f"{what} of type {info.type.name} has {info.shape[-1]} columns, which "
            f"{info.type.block_columns} does not divide"
        )
    if not aligned:
        raise CheckpointError(f"{what} begins at byte {info.first}, which is not aligned")
    if info.first + info.nbytes > file_bytes:
        raise CheckpointError(
            f"{info.file} is cut short: its tensor {shown(info.name)} needs bytes {info.first} to "
            f"{info.first + info.nbytes}, and the file has {file_bytes}"
        )
