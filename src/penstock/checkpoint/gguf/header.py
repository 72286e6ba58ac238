"""The header of a GGUF file: metadata and tensor offsets. Versions 2 and 3, little-endian.

    "GGUF" | version | number of tensors | number of metadata entries
    metadata     key | type | value                                       per entry
    tensors      name | dimensions, columns first | type | offset         per tensor
    padding to general.alignment, then the tensors' data

The reader does not trust the file: it checks every length and count against the rest of the file, and against limits
far above any model in use, before it reads or allocates that much. The package `gguf` has no such limits and takes
seconds to read a vocabulary; the tests compare this reader with it.
"""

import math
import mmap
import os
import stat
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from penstock.checkpoint.gguf.types import TensorType, tensor_type
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 64 * 2**20
"""The largest headers in use have 20 MB."""
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**16
_MAX_ARRAY = 2**20
"""Elements of an array; vocabularies have up to 262,144 tokens and twice as many merges."""
_MAX_NAME_BYTES = 2**16
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**20
_MAX_WINDOW, _MIN_WINDOW = 2**17, 2**12
"""Bytes in which strings are looked for at once: the most, and the fewest, after others than short ones."""
_FEW = 256
"""Strings that are parsed one by one where short ones do not fill half a window."""

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Type codes of number types (as in `struct` and `array`), by type id."""
_NUMBERS = {type_id: struct.Struct("<" + code) for type_id, code in _FORMATS.items()}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_UINT32, _UINT64 = _NUMBERS[4], _NUMBERS[10]


class StringArray:
    """An array of strings, decoded on demand: decoding a vocabulary takes 0.1 s."""

    __slots__ = ("_content", "_firsts")

    def __init__(self, content: bytes, firsts: "array[int]") -> None:
        """
        Args:
            firsts: offsets in `content` of each string's 8-byte length field, then the end of the last string.
        """
        self._content, self._firsts = content, firsts

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def decode(self) -> list[str]:
        """
        Raises:
            UnicodeDecodeError: a string is not valid UTF-8.
        """
        texts = self._lines().decode().split("\n")[1:]
        if len(texts) == len(self):  # as nearly always; a call a string would take 2 to 3 times as long
            return texts
        content = self._content
        return [content[first + 8 : last].decode() for first, last in pairwise(self._firsts)]

    def decode_pairs(self) -> list[tuple[str, str]] | None:
        """The parts of each string before and after its only space; None: one has no space, several, or an empty part.

        Raises as `decode` does.
        """
        import numpy as np

        text = self._lines()
        letters = np.frombuffer(text, np.uint8)
        breaks, spaces = np.flatnonzero(letters == ord("\n")), np.flatnonzero(letters == ord(" "))
        if not len(breaks) == len(spaces) == len(self):
            return None
        ends = np.append(breaks[1:], len(letters))
        if not ((breaks + 1 < spaces) & (spaces + 1 < ends)).all():
            return None
        parts = text.replace(b" ", b"\n").decode().split("\n")
        return list(zip(parts[1::2], parts[2::2], strict=True))

    def _lines(self) -> bytes:
        """The strings, each after a line break instead of its length."""
        import numpy as np  # here: most commands read no GGUF file

        content = np.frombuffer(self._content, np.uint8).copy()
        firsts = np.frombuffer(self._firsts, np.uint64)[:-1].astype(np.intp)
        content[firsts] = ord("\n")
        is_kept = np.ones(len(content), np.bool_)
        for offset in range(1, 8):
            is_kept[firsts + offset] = False
        return bytes(content[is_kept])

    def find(self, text: str) -> int | None:
        """The index of a string; None: there is none. It decodes nothing."""
        wanted = text.encode()
        stored = len(wanted).to_bytes(8, "little") + wanted
        place = self._content.find(stored)
        while place >= 0:
            index = bisect_left(self._firsts, place)
            if index < len(self) and self._firsts[index] == place:
                return index
            # The length and text of another string may lie within one.
            place = self._content.find(stored, place + 1)
        return None

    def pick(self, indices: Iterable[int]) -> dict[int, str]:
        """The strings at `indices`, in ascending order; indices out of range are left out. Raises as `decode` does."""
        content, firsts, count = self._content, self._firsts, len(self)
        there = sorted(index for index in indices if index < count)
        return {index: content[firsts[index] + 8 : firsts[index + 1]].decode() for index in there}


Value: TypeAlias = "bool | int | float | str | StringArray | array[Any]"
"""The value of a metadata entry; an array of booleans has the type code B."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's type, shape and position in its file."""

    file: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]
    """Rows first; the last dimension is the columns, stored in consecutive blocks."""
    first: int
    """Offset of its first byte in the file."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block_columns * self.type.block_bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a GGUF file before the tensor data."""

    file: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """Read a file's header.

    Raises:
        CheckpointError: the file is not a GGUF file, has an unsupported version, is damaged or truncated, or its header
            exceeds the limits.
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
                raise CheckpointError(f"{file} is not a GGUF file: it has {status.st_size} bytes")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
                yield content
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


class _Cursor:
    """Reads a header from front to back, and never past its end."""

    def __init__(self, file: Path, content: memoryview) -> None:
        self.file, self._content, self.at = file, content, 0
        # One bound for all reads: no count in the file can make this process read more.
        self._end = min(len(content), _MAX_HEADER_BYTES)

    def take(self, size: int) -> int:
        """Advance by `size` bytes; returns where they begin."""
        first = self.at
        if size > self._end - first:
            self.fail_at_end()
        self.at = first + size
        return first

    def fail_at_end(self) -> NoReturn:
        if self._end < len(self._content):
            raise CheckpointError(
                f"{self.file} has a header of more than {_MAX_HEADER_BYTES} bytes, the limit for headers"
            )
        raise CheckpointError(
            f"{self.file} is damaged or truncated: its header extends past the end of the file; download it again"
        )

    def bytes(self, size: int) -> bytes:
        first = self.take(size)
        return bytes(self._content[first : first + size])

    def number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self._content, self.take(form.size))[0]

    def count(self, what: str, most: int) -> int:
        """Read the number of items that follow, at most `most`."""
        count: int = self.number(_UINT64)
        if count > most:
            raise CheckpointError(f"{self.file} is damaged: it declares {count} {what}; the limit is {most}")
        return count

    def text(self, what: str, max_bytes: int = _MAX_HEADER_BYTES) -> str:
        size: int = self.number(_UINT64)
        if size > max_bytes:
            raise CheckpointError(f"{self.file} is damaged: {what} has {size} bytes; the limit is {max_bytes}")
        try:
            return self.bytes(size).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file} is damaged: {what} is not valid UTF-8: {error}") from error

    def strings(self, count: int) -> StringArray:
        """Read an array of strings without decoding them: only their lengths are parsed."""
        first, firsts = self.at, array("Q", [0])
        content, unpack, window = self._content, _UINT64.unpack_from, _MAX_WINDOW
        try:
            while (left := count + 1 - len(firsts)) > 0:
                at = first + firsts[-1]
                ends = _ends_of_short(bytes(content[at : at + window]))[:left]
                firsts.frombytes((ends + firsts[-1]).tobytes())
                if len(ends) and ends[-1] > window // 2:
                    window = min(2 * window, _MAX_WINDOW)
                else:  # so that no byte is parsed more than a few times, whatever the strings are
                    at, window = first + firsts[-1], _MIN_WINDOW
                    for _ in range(min(_FEW, left - len(ends))):
                        at += 8 + unpack(content, at)[0]
                        firsts.append(at - first)
        except (struct.error, OverflowError):  # past the end of the file
            self.fail_at_end()
        at = self.take(firsts[-1])
        return StringArray(bytes(content[at : self.at]), firsts)


def _ends_of_short(window: bytes) -> "NDArray[np.uint64]":
    """The ends of the strings at the beginning of `window` that have 1 to 255 bytes, as most do, up to another one.

    The length of such a string is a byte that is not zero before seven zeros. To look for them all at once takes a
    quarter of the time of following the lengths, of which vocabularies have hundreds of thousands.
    """
    import numpy as np  # here: most commands read no GGUF file

    content = np.frombuffer(window, np.uint8)
    zeros = content == 0
    pairs = zeros[:-1] & zeros[1:]
    fours = pairs[:-2] & pairs[2:]
    sevens = fours[:-3] & fours[3:]
    lengths = np.flatnonzero(~zeros[:-7] & sevens[1:])
    ends = (lengths + 8 + content[lengths]).astype(np.uint64)
    if not len(lengths) or lengths[0]:
        return ends[:0]
    breaks = np.flatnonzero(ends[:-1] != lengths[1:])
    return ends[: breaks[0] + 1] if len(breaks) else ends


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; returns the numbers of tensors and of metadata entries."""
    if cursor.bytes(4) != _MAGIC:
        raise CheckpointError(f"{cursor.file} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
    version = cursor.number(_UINT32)
    if version not in _VERSIONS:
        # The bytes of a small number in the other order.
        if version and version & 0xFFFF == 0:
            raise CheckpointError(
                f"{cursor.file} is a big-endian GGUF file; only little-endian ones are supported: convert it with "
                "gguf-convert-endian FILE little"
            )
        hint = ": convert the model again with a current llama.cpp" * (version == 1)
        raise CheckpointError(f"{cursor.file} has GGUF version {version}; supported: 2 and 3{hint}")
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
    raise CheckpointError(f"{cursor.file} is damaged: the metadata entry {shown(key)} has the unknown type {type_id}")


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
    """Read a tensor entry: (name, shape, type id, offset in the tensor data)."""
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
    """Compute the tensors' positions, by name; checks that they lie within the file and do not overlap."""
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
                f"{file} is damaged: the tensors {shown(before)} and {shown(info.name)} overlap in the file"
            )
        end, before = info.first + info.nbytes, info.name
    return tensors


def _known_type(file: Path, name: str, type_id: int) -> TensorType:
    known = tensor_type(type_id)
    if known is None:
        raise CheckpointError(f"{file} is damaged or too new: its tensor {shown(name)} has the unknown type {type_id}")
    return known


def _check_place(info: TensorInfo, aligned: bool, file_bytes: int) -> None:
    what = f"{info.file} is damaged: its tensor {shown(info.name)}"
    if not all(info.shape):
        raise CheckpointError(f"{what} has the shape {list(info.shape)}")
    if info.shape[-1] % info.type.block_columns:
        raise CheckpointError(
            f"{what} of type {info.type.name} has {info.shape[-1]} columns, not a multiple of {info.type.block_columns}"
        )
    if not aligned:
        raise CheckpointError(f"{what} begins at byte {info.first}, which is not aligned")
    if info.first + info.nbytes > file_bytes:
        raise CheckpointError(
            f"{info.file} is truncated: its tensor {shown(info.name)} needs bytes {info.first} to "
            f"{info.first + info.nbytes}, but the file has {file_bytes}: download it again"
        )
