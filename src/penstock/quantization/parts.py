"""Parameters that gather several checkpoint tensors, and parameters that only verify a tensor."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataclass import dataclass
from penstock.errors import CheckpointError
from penstock.quantization.rows import Parameter

FLOATS = ("float16", "bfloat16", "float32")


Tensors = dict[str, NDArray[Any]]
"""Complete tensors of a group, by name."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The required shape and dtype of one tensor of a group."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def tensor_group(parts: Mapping[str, TensorPart], finish: Callable[[Tensors], None]) -> dict[str, Parameter]:
    """Parameters with the names of `parts`, which call `finish` with all tensors once the last row is loaded.

    Errors of `finish` are raised by the `load` of that row. Until then the tensors are kept in memory unchanged.
    """
    gathered: Tensors = {}
    missing = {name: part.shape[0] for name, part in parts.items()}

    def arrive(name: str, first: int, rows: NDArray[Any]) -> None:
        if rows.dtype.name not in parts[name].dtypes:
            raise CheckpointError(f"has the type {rows.dtype.name}, not {' or '.join(parts[name].dtypes)}")
        if name not in gathered:
            gathered[name] = np.empty(parts[name].shape, rows.dtype)
        gathered[name][first : first + len(rows)] = rows
        missing[name] -= len(rows)
        if not any(missing.values()):
            finish(gathered)
            gathered.clear()

    return {name: _Gathered(name, part.shape, arrive) for name, part in parts.items()}


class _Gathered:
    def __init__(self, name: str, shape: tuple[int, ...], arrive: Callable[[str, int, NDArray[Any]], None]) -> None:
        self.shape = shape
        self._name, self._arrive = name, arrive

    def load(self, first: int, rows: NDArray[Any]) -> None:
        self._arrive(self._name, first, rows)


class CheckedTensor:
    """An integer tensor that must equal the expected one; `otherwise` is the error message, after the tensor's name."""

    def __init__(self, expected: NDArray[np.int64], otherwise: str, *, is_optional: bool = False) -> None:
        """
        Args:
            is_optional: whether the checkpoint may lack it.
        """
        self.shape: tuple[int, ...] = expected.shape
        self.is_optional = is_optional
        self._expected, self._otherwise = expected, otherwise

    def load(self, first: int, rows: NDArray[Any]) -> None:
        if not np.array_equal(rows.astype(np.int64), self._expected[first : first + len(rows)]):
            raise CheckpointError(self._otherwise)
