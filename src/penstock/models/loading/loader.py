"""Loads weights from files into a model's parameters, which pack them as they are read.

The files are memory-mapped, and mapped pages count as the process's memory until they are unmapped. Therefore a file is
read in pieces and remapped after every few pieces: peak memory exceeds the weights by only a few per cent, whatever the
size of the largest tensor.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from penstock.checkpoint.float_bits import is_finite
from penstock.dataclass import dataclass
from penstock.errors import CheckpointError
from penstock.quantization.parts import FLOATS, CheckedTensor
from penstock.quantization.rows import Parameter
from penstock.system.loading_progress import report_bytes

MIN_PIECE_BYTES = 2**20
_MAY_HAVE_UNUSED_ROWS = re.compile(r"embed|wte")
"""Tables whose rows of tokens that no tokenizer gives may never have been set."""
PIECES = 48
"""Number of pieces of a large file. Each piece costs milliseconds: mapping, and threads that finish unevenly."""


class OpenWeights(Protocol):
    """A memory-mapped file of weights."""

    def read(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Read rows `first` to `last` (exclusive) of a tensor; types that numpy lacks are those of `ml_dtypes`.

        Raises:
            CheckpointError: the rows cannot be read; the caller puts the tensor's name before the message.
        """
        ...


class WeightFile(Protocol):
    """One file of a checkpoint's weights."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor shapes, by the names of the model's parameters."""

    def open(self) -> AbstractContextManager[OpenWeights]:
        """Map the file until the context ends."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `first` to `last` (exclusive) of a tensor in a file."""

    name: str
    first: int
    last: int


def load_weights(
    files: Sequence[WeightFile],
    parameters: dict[str, Parameter],
    ignored: "re.Pattern[str]",
    filled: Set[str] = frozenset(),
) -> None:
    """Load every parameter that is not `filled` from the checkpoint's tensor of the same name.

    Optional tensors may be missing, and equal ones may be in several files. Tensors whose whole name matches `ignored`
    are skipped.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing, unexpected, of the wrong shape or rejected by its
            parameter.
    """
    missing = [name for name, parameter in parameters.items() if name not in filled and not _is_optional(parameter)]
    sizes = [file.path.stat().st_size for file in files]
    found: dict[str, WeightFile] = {}
    for number, file in enumerate(files):
        for name in filter(found.__contains__, file.shapes):
            _check_equal(name, found[name], file)
        names = _load_file(file, parameters, ignored, filled | found.keys(), sum(sizes[:number]), sum(sizes))
        found.update(dict.fromkeys(names, file))
    missing = [name for name in missing if name not in found]
    if missing:
        where = files[0].path if len(files) == 1 else files[0].path.parent
        raise CheckpointError(f"the weights in {where} lack {_some(missing)}")


def _load_file(
    file: WeightFile,
    parameters: dict[str, Parameter],
    ignored: "re.Pattern[str]",
    filled: Set[str],
    bytes_before: int,
    total_bytes: int,
) -> list[str]:
    """Load the tensors of one file and return their names.

    Args:
        filled: names of parameters that are not loaded from it.
        bytes_before: bytes of the files before it.
        total_bytes: bytes of all files.
    """
    # sorted, so that tensors of one group are adjacent, whatever their order in the file
    given = [name for name in file.shapes if name not in filled]
    names = sorted(name for name in given if name in parameters or not ignored.fullmatch(name))
    unexpected = [name for name in names if name not in parameters]
    if unexpected:
        raise CheckpointError(f"{file.path} holds {_some(unexpected)}, which this architecture does not have")
    wrapped = {
        name: _Wrapped(parameters[name], file.shapes[name])
        for name in names
        if _has_leading_axes(file.shapes[name], parameters[name].shape)
    }
    parameters = parameters | wrapped
    for name in names:
        if file.shapes[name] != parameters[name].shape:
            wanted = list(parameters[name].shape)
            raise CheckpointError(
                f"{name} in {file.path} has the shape {list(file.shapes[name])}; the model's config requires {wanted}"
            )
    size = file.path.stat().st_size
    num_elements, num_read = max(1, sum(math.prod(file.shapes[name]) for name in names)), 0
    for pieces in _batches(parameters, names, max(MIN_PIECE_BYTES, size // PIECES)):
        with file.open() as weights:
            for piece in pieces:
                _load_piece(piece, weights, parameters[piece.name], file.path)
                num_read += (piece.last - piece.first) * math.prod(file.shapes[piece.name][1:])
        report_bytes(bytes_before + size * num_read // num_elements, total_bytes)
    return names


def _has_leading_axes(stored: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    extra = len(stored) - len(needed)
    return extra > 0 and stored == (*[1] * extra, *needed)


class _Wrapped:
    """A tensor that the checkpoint stores with leading axes of size 1, as a vector in a matrix. See `Parameter`."""

    def __init__(self, parameter: Parameter, stored: tuple[int, ...]) -> None:
        self.shape = stored
        self._parameter = parameter

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self._parameter.load(0, rows.reshape(self._parameter.shape))


def _check_equal(name: str, file: WeightFile, other: WeightFile) -> None:
    """
    Raises:
        CheckpointError: two files hold the tensor with different values.
    """
    rows, *rest = file.shapes[name]
    step = max(1, MIN_PIECE_BYTES // (4 * math.prod(rest)))
    with file.open() as a, other.open() as b:
        if file.shapes[name] != other.shapes[name] or any(
            not _are_equal(a.read(name, at, min(at + step, rows)), b.read(name, at, min(at + step, rows)))
            for at in range(0, rows, step)
        ):
            raise CheckpointError(f"{file.path} and {other.path} both hold {name}, and their values differ")


def _are_equal(rows: NDArray[Any], others: NDArray[Any]) -> bool:
    return rows.dtype == others.dtype and rows.tobytes() == others.tobytes()


def _load_piece(piece: Piece, weights: OpenWeights, parameter: Parameter, path: Path) -> None:
    try:
        rows = weights.read(piece.name, piece.first, piece.last)
        if not _MAY_HAVE_UNUSED_ROWS.search(piece.name):
            _check_finite(rows)
        parameter.load(piece.first, rows)
    except CheckpointError as error:
        raise CheckpointError(f"{piece.name} in {path} {error}") from None


def _check_finite(rows: NDArray[Any]) -> None:
    """Check a matrix, at memory bandwidth. Vectors are not checked: their values may be infinite for a reason.

    Raises:
        CheckpointError: it has NaN or infinite values; the caller puts the tensor's name before the message.
    """
    if rows.ndim == 2 and rows.dtype.name in FLOATS and not is_finite(rows):
        raise CheckpointError("has weights that are not finite, such as NaN")


def _batches(parameters: dict[str, Parameter], names: list[str], limit: int) -> Iterator[list[Piece]]:
    """Split the tensors into pieces along the first axis, and group the pieces into batches of about `limit` bytes."""
    batch: list[Piece] = []
    size = 0
    for name in names:
        rows, *rest = parameters[name].shape
        row_bytes = 4 * math.prod(rest)  # for the widest type
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


def _is_optional(parameter: Parameter) -> bool:
    return isinstance(parameter, CheckedTensor) and parameter.is_optional


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more tensors"
