"""Weights from safetensors files straight into a model's parameters, which pack them as they come.

The files are memory-mapped, and mapped pages count as the process's memory until they are unmapped. So a file is read
in pieces and mapped anew for each few of them: the peak is the weights and a few per cent, however large a single
tensor is.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from penstock.checkpoint import weight_files
from penstock.errors import CheckpointError
from penstock.quantization.base import Parameter

MIN_PIECE_BYTES = 2**20
PIECES = 48
"""Into how many pieces a large file is cut: each costs milliseconds, to map it anew and as threads end unevenly."""
_MAX_HEADER_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `first` to `last` of a tensor in a file."""

    name: str
    first: int
    last: int


def load_weights(folder: Path, parameters: dict[str, Parameter], ignored: "re.Pattern[str]") -> None:
    """Fill every parameter from the checkpoint's tensor of its name.

    Tensors whose whole name matches `ignored` are skipped.

    Raises:
        CheckpointError: no weights, a damaged file, or a tensor that is missing, unexpected, of a wrong shape or not
            what its parameter takes.
    """
    missing = dict.fromkeys(parameters)
    for file in weight_files(folder):
        for name in _load_file(file, parameters, ignored):
            missing.pop(name, None)
    if missing:
        raise CheckpointError(f"the weights in {folder} lack {_some(list(missing))}")


def _load_file(file: Path, parameters: dict[str, Parameter], ignored: "re.Pattern[str]") -> list[str]:
    """Load the tensors of one file and return their names."""
    with _open(file) as tensors:
        stored: list[str] = tensors.keys()
        # in this order tensors that belong together follow one another, however the file has them
        names = sorted(name for name in stored if name in parameters or not ignored.fullmatch(name))
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    unexpected = [name for name in names if name not in parameters]
    if unexpected:
        raise CheckpointError(f"{file} holds {_some(unexpected)}, which this architecture does not have")
    for name, shape in shapes.items():
        if shape != parameters[name].shape:
            wanted = list(parameters[name].shape)
            raise CheckpointError(f"{name} in {file} has the shape {list(shape)}; config.json asks for {wanted}")
    for pieces in _batches(parameters, names, max(MIN_PIECE_BYTES, file.stat().st_size // PIECES)):
        with _open(file) as tensors:
            for piece in pieces:
                _load_piece(piece, tensors, parameters[piece.name], file)
    return names


def _load_piece(piece: Piece, tensors: Any, parameter: Parameter, file: Path) -> None:
    try:
        parameter.load(piece.first, tensors.get_slice(piece.name)[piece.first : piece.last])
    except CheckpointError as error:
        raise CheckpointError(f"{piece.name} in {file} {error}") from None
    except SafetensorError as error:  # of a type that torch does not have
        raise CheckpointError(f"{piece.name} in {file} cannot be read: {error}") from error


def _batches(parameters: dict[str, Parameter], names: list[str], limit: int) -> Iterator[list[Piece]]:
    """The tensors, cut into pieces along the first axis, in groups of about `limit` bytes."""
    batch: list[Piece] = []
    size = 0
    for name in names:
        rows, *rest = parameters[name].shape
        row_bytes = 4 * math.prod(rest)  # of the file's type at its widest
        step = max(1, limit // row_bytes)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            batch.append(Piece(name, first, last))
            size += (last - first) * row_bytes
            if size >= limit:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _open(file: Path) -> Any:
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


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more tensors"
