"""A GGUF model: a single file, or a split one (NAME-00001-of-00003.gguf)."""

import functools
import re
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from penstock.checkpoint.gguf.header import Header, StringArray, TensorInfo, Value, read_header
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError, shown

T = TypeVar("T", bool, int, float, str)
D = TypeVar("D")

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MMPROJ = re.compile(r"(^|[-._])mmproj([-._]|$)", re.IGNORECASE)
_STATISTICS = re.compile(r"^imatrix([-._]|$)|[-._]imatrix$", re.IGNORECASE)
"""The name of a file of a quantizer's statistics; models may be called M-imatrix-Q4_K_M."""
_MAX_PARTS = 1000
_READING = threading.Lock()
_MOST_LISTED = 12
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class Metadata:
    """The metadata of a GGUF file, with type-checked access."""

    def __init__(self, file: Path, values: Mapping[str, Value]) -> None:
        self.file, self._values = file, values

    def below(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, with it removed."""
        return [key.removeprefix(prefix) for key in self._values if key.startswith(prefix)]

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, or None if it is absent.

        Raises:
            CheckpointError: the value has another type, or is infinite or NaN.
        """
        value = self._values.get(key)
        if value is None:
            return None
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right or (kind is float and not abs(cast(float, value)) < float("inf")):
            raise CheckpointError(f"{key} in {self.file} must be {_NAMES[kind]}, not {_described(value)}")
        return cast(T, value)

    def need(self, key: str, kind: type[T]) -> T:
        """Like `find`, but raises if the key is absent."""
        value = self.find(key, kind)
        if value is None:
            raise CheckpointError(f"{self.file} lacks {key}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """The array of strings at `key`, or None if it is absent. Raises as `find` does."""
        found = self.string_array(key)
        return None if found is None else self._decoded(key, found.decode)

    def string_pairs(self, key: str) -> list[tuple[str, str]] | None:
        """`StringArray.decode_pairs` of the array at `key`; None also if it is absent. Raises as `find` does."""
        found = self.string_array(key)
        return None if found is None else self._decoded(key, found.decode_pairs)

    def some_strings(self, key: str, indices: set[int]) -> dict[int, str]:
        """The strings at `indices` of an array; indices out of range are left out. Raises as `find` does."""
        found = self.string_array(key)
        return {} if found is None else self._decoded(key, lambda: found.pick(indices))

    def string_array(self, key: str) -> StringArray | None:
        """Like `strings`, but not decoded yet."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, StringArray):
            raise CheckpointError(f"{key} in {self.file} must be an array of strings, not {_described(value)}")
        return value

    def _decoded(self, key: str, decode: Callable[[], D]) -> D:
        try:
            return decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{key} in {self.file} holds a string that is not valid UTF-8: {error}") from error

    def is_array(self, key: str) -> bool:
        """Whether the value of `key` is an array of numbers."""
        return isinstance(self._values.get(key), array)

    def numbers(self, key: str, codes: str) -> "array[Any] | None":
        """The array of numbers at `key`, or None if it is absent. Raises as `find` does.

        Args:
            codes: the accepted type codes of `array`.
        """
        value = self._values.get(key)
        if value is not None and (not isinstance(value, array) or value.typecode not in codes):
            raise CheckpointError(f"{key} in {self.file} must be an array of another type, not {_described(value)}")
        return value


def _described(value: Value) -> str:
    if isinstance(value, (array, StringArray)):
        kind = "strings" if isinstance(value, StringArray) else f"numbers of type {value.typecode}"
        return f"an array of {len(value)} {kind}"
    return shown(value)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The headers of a GGUF model."""

    path: Path
    """The only file, or the first of a split model."""
    files: tuple[Path, ...]
    metadata: Metadata
    """The first file's: the others hold only their number."""
    tensors: Mapping[str, TensorInfo]
    """The tensors of all files, by name."""


def open_gguf(path: Path, types: Sequence[str] = ("model",)) -> GGUFFile:
    """Read the header of a GGUF file and, for a split model, of its other files.

    Args:
        types: accepted values of `general.type`, which is the last where the file has none.

    Raises:
        CheckpointError: a file is missing or damaged, or `path` is not the first file of a split model.
    """
    first = _header(path)
    metadata = Metadata(path, first.metadata)
    kind = metadata.find("general.type", str) or types[-1]
    if kind not in types:
        hint = "; give it to its base model as adapter NAME=FILE (--adapter)" * (kind == "adapter")
        raise CheckpointError(f"{path} is no {types[0]}: its general.type is {shown(kind)}, not {types[0]}{hint}")
    headers = [first, *(_read_part(part, metadata) for part in _other_parts(path, metadata))]
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"the tensor {shown(name)} is in {tensors[name].file} and in {info.file}")
            tensors[name] = info
    _check_number(metadata, len(tensors))
    return GGUFFile(path, tuple(header.file for header in headers), metadata, tensors)


def read_metadata(path: Path) -> Metadata:
    """The metadata of a GGUF model. Raises as `open_gguf` does, of this file alone."""
    return Metadata(path, _header(path).metadata)


def _header(path: Path) -> Header:
    try:
        found = path.stat()
    except OSError:
        return read_header(path)  # raises an error that names the reason
    with _READING:  # the second thread of a start takes what the first has read
        return _read_once(path, found.st_mtime_ns, found.st_size, found.st_ino)


@functools.lru_cache(maxsize=4)
def _read_once(path: Path, *_identity: int) -> Header:
    """Read a header, cached while a model loads: parsing one with a large vocabulary takes 0.1 s."""
    return read_header(path)


def _other_parts(path: Path, metadata: Metadata) -> list[Path]:
    count = metadata.find("split.count", int) or 1
    if count == 1:
        return []
    if not 1 <= count <= _MAX_PARTS:
        raise CheckpointError(f"split.count in {path} must be from 1 to {_MAX_PARTS}, not {count}")
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise CheckpointError(
            f"{path} is one of the {count} files of a split model; they must be named "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    parts = [path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if path != parts[0]:
        raise CheckpointError(f"{path} is not the first of the {count} files of a split model: give {parts[0]}")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of the {count} files of a split model; {missing[0]} is missing")
    return parts[1:]


def _read_part(part: Path, first: Metadata) -> Header:
    header = read_header(part)
    count = Metadata(part, header.metadata).find("split.count", int)
    if count != first.find("split.count", int):
        raise CheckpointError(f"{part} does not belong to the same model as {first.file}: its split.count is {count}")
    return header


def _check_number(metadata: Metadata, count: int) -> None:
    expected = metadata.find("split.tensors.count", int)
    if expected is not None and expected != count:
        raise CheckpointError(f"the files of {metadata.file} hold {count} tensors; split.tensors.count is {expected}")


def is_gguf(path: Path) -> bool:
    """Whether a file has the suffix .gguf or begins with GGUF's magic bytes."""
    if not path.is_file():  # opening a pipe may block forever
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(4) == b"GGUF"
    except OSError:
        return False


def model_name(path: Path) -> str:
    """The model's name: the file name without `.gguf` and without the numbers of a split file."""
    part = _PART.fullmatch(path.name)
    return path.name.removesuffix(".gguf") if part is None else part["stem"]


def choose_gguf(names: Sequence[str], choice: str | None, where: str) -> str:
    """Choose a model among GGUF files; returns its file, or the first file of a split model.

    Args:
        choice: a file name, or its ending, such as Q4_K_M.
        where: the folder or repository of the files, for error messages.

    Raises:
        CheckpointError: no model matches, or more than one.
    """
    models = [name for name in sorted(names) if _begins_model(Path(name).name)]
    if not models and (part := next(filter(None, map(_PART.fullmatch, sorted(names))), None)):
        first = f"{part['stem']}-00001-of-{part['count']}.gguf"
        raise CheckpointError(f"{where} has {part[0]}, a part of a split model, but lacks its first file, {first}")
    chosen = models if choice is None else [name for name in models if _is_chosen(name, choice)]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(models[:_MOST_LISTED]) + (
        f" and {len(models) - _MOST_LISTED} more" * (len(models) > _MOST_LISTED)
    )
    if not chosen and choice is not None:
        raise CheckpointError(f"{where} has no GGUF file {choice}; it has {listed or 'none'}")
    raise CheckpointError(
        f"{where} has {len(chosen)} GGUF models; give one of them as FILE, or as REPOSITORY:FILE: {listed}"
    )


def is_model_name(name: str) -> bool:
    """Whether a GGUF file of this name may be a model."""
    return not is_mmproj_name(name) and _STATISTICS.search(Path(name).name.removesuffix(".gguf")) is None


def is_mmproj_name(name: str) -> bool:
    """Whether the name is that of an mmproj file (mmproj-F16.gguf, NAME.mmproj-f16.gguf)."""
    return _MMPROJ.search(Path(name).name.removesuffix(".gguf")) is not None


def _begins_model(name: str) -> bool:
    part = _PART.fullmatch(name)
    return is_model_name(name) and (part is None or int(part["number"]) == 1)


def _is_chosen(name: str, choice: str) -> bool:
    stem = model_name(Path(name)).lower()
    return name == choice or re.search(rf"(^|[-._]){re.escape(choice.lower())}$", stem) is not None


def parts_of(names: Sequence[str], first: str) -> list[str]:
    """The files of the model whose first file is `first`."""
    part = _PART.fullmatch(first)
    if part is None:
        return [first]
    return [name for name in names if (other := _PART.fullmatch(name)) and other["stem"] == part["stem"]]
