"""Parameters that gather several checkpoint tensors, and parameters that only verify a tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.quantization.base import Parameter

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The required shape and dtype of one tensor of a group."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def tensor_group(parts: Mapping[str, TensorPart], finish: Callable[[dict[str, Tensor]], None]) -> dict[str, Parameter]:
    """Parameters with the names of `parts`, which call `finish` with all tensors once the last row is loaded.

    Errors of `finish` are raised by the `load` of that row. Until then the tensors are kept in memory unchanged.
    """
    gathered: dict[str, Tensor] = {}
    missing = {name: part.shape[0] for name, part in parts.items()}

    def arrive(name: str, first: int, rows: Tensor) -> None:
        if rows.dtype not in parts[name].dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in parts[name].dtypes)
            raise CheckpointError(f"has the type {str(rows.dtype).removeprefix('torch.')}, not {wanted}")
        if name not in gathered:
            gathered[name] = torch.empty(parts[name].shape, dtype=rows.dtype)
        gathered[name][first : first + len(rows)] = rows
        missing[name] -= len(rows)
        if not any(missing.values()):
            finish(gathered)
            gathered.clear()

    return {name: _Gathered(name, part.shape, arrive) for name, part in parts.items()}


class _Gathered:
    def __init__(self, name: str, shape: tuple[int, ...], arrive: Callable[[str, int, Tensor], None]) -> None:
        self.shape = shape
        self._name, self._arrive = name, arrive

    def load(self, first: int, rows: Tensor) -> None:
        self._arrive(self._name, first, rows)


class CheckedTensor:
    """An integer tensor that must equal the expected one; `otherwise` is the error message, after the tensor's name."""

    def __init__(self, expected: Tensor, otherwise: str, *, is_optional: bool = False) -> None:
        """
        Args:
            is_optional: whether the checkpoint may lack it.
        """
        self.shape: tuple[int, ...] = tuple(expected.shape)
        self.is_optional = is_optional
        self._expected, self._otherwise = expected, otherwise

    def load(self, first: int, rows: Tensor) -> None:
        if not torch.equal(rows.to(self._expected.dtype), self._expected[first : first + len(rows)]):
            raise CheckpointError(self._otherwise)
