"""Weights in safetensors files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.loader import OpenWeights

_MAX_HEADER_BYTES = 32 * 2**20


class SafetensorsFile:
    """One of them."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: it is damaged or cut short.
        """
        self.path = path
        with _opened(path) as tensors:
            names: list[str] = tensors.keys()
            self.shapes: Mapping[str, tuple[int, ...]] = {
                name: tuple(tensors.get_slice(name).get_shape()) or (1,) for name in names
            }

    @contextmanager
    def open(self) -> Iterator[OpenWeights]:
        with _opened(self.path) as tensors:
            yield _Slices(tensors)


class _Slices:
    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def read(self, name: str, first: int, last: int) -> Tensor:
        try:
            part = self._tensors.get_slice(name)
            rows: Tensor = part[first:last] if part.get_shape() else self._tensors.get_tensor(name).view(1)
        except SafetensorError as error:  # of a type that torch does not have
            raise CheckpointError(f"cannot be read: {error}") from error
        return rows


def _opened(file: Path) -> Any:
    """
    Raises:
        CheckpointError: its header is larger than any in use (the library would take several times as much memory), or
            does not fit the file.
    """
    try:
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
        if _MAX_HEADER_BYTES < header_bytes < file.stat().st_size:
            raise CheckpointError(
                f"{file} has a header of {header_bytes} bytes; at most {_MAX_HEADER_BYTES} are read, which are 200,000 "
                "tensors"
            )
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short: {error}") from error
