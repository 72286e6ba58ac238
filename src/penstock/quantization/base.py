"""How a checkpoint's tensors become the weights of linear maps."""

from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.linear.weight import Weight
from penstock.kernels.ops import Ops
from penstock.memory import WeightKind


class Parameter(Protocol):
    """Where one tensor of a checkpoint goes."""

    shape: tuple[int, ...]
    """What it must have in the checkpoint."""

    def load(self, first: int, rows: Tensor) -> None:
        """Take the tensor's rows from `first` on. All of them come once, in any order.

        Raises:
            CheckpointError: they are not what it takes; the message goes on after the tensor's name.
        """
        ...


class TensorParameter:
    """A tensor that is kept as it is, in the target's type."""

    def __init__(self, target: Tensor) -> None:
        self.shape: tuple[int, ...] = tuple(target.shape)
        self._target = target

    def load(self, first: int, rows: Tensor) -> None:
        self._target[first : first + len(rows)].copy_(rows)


class FloatRows:
    """Rows of a weight that the checkpoint holds as floating point, and here the kernel, too."""

    def __init__(self, weight: Weight, first: int, count: int) -> None:
        self.shape: tuple[int, ...] = (count, weight.columns)
        self._weight, self._first = weight, first

    def load(self, first: int, rows: Tensor) -> None:
        self._weight.load(self._first + first, rows)


class Method(Protocol):
    """One way to store linear maps: what kind of weight the kernel gets, and what the checkpoint holds for it."""

    kind: WeightKind
    head_kind: WeightKind
    """Of the output projection, which may be the token embedding too."""

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        """The tensors of the checkpoint's linear map `name`, whose rows are `count` of `weight` from `first` on."""
        ...

    def head_parameters(self, weight: Weight, name: str) -> dict[str, Parameter]:
        """Likewise of the output projection, or of the embedding that is also that."""
        ...


class Unquantized:
    """Weights in the model's dtype."""

    kind: WeightKind = "float"
    head_kind: WeightKind = "float"

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": FloatRows(weight, first, count)}

    def head_parameters(self, weight: Weight, name: str) -> dict[str, Parameter]:
        return self.parameters(weight, name, 0, weight.rows)


class WeightFactory:
    """Makes a model's weights, by a method, in a dtype on a device; `ops` is what layers compute with."""

    def __init__(self, method: Method, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.method, self.ops, self.dtype, self.device = method, ops, dtype, device

    def linear(self, rows: int, columns: int, *, gated: bool = False) -> Weight:
        """A linear map's weight, without content."""
        return self.ops.new_weight(rows, columns, self.method.kind, gated=gated, dtype=self.dtype, device=self.device)

    def head(self, rows: int, columns: int) -> Weight:
        """The output projection's weight, without content."""
        return self.ops.new_weight(
            rows, columns, self.method.head_kind, gated=False, dtype=self.dtype, device=self.device
        )

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor without content."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
