"""How a checkpoint's tensors become the weights of linear maps."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.linear.weight import LinearMap, Weight
from penstock.kernels.ops import Ops
from penstock.weight_formats import FLOAT, WeightFormat


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
    """One way to store linear maps: in which format the kernel gets each, and what the checkpoint holds for it."""

    def format_of(self, name: str) -> WeightFormat:
        """The format of the matrix that the checkpoint calls `name`, without `.weight`."""
        ...

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        """The tensors of the checkpoint's matrix `name`, whose rows are `count` of `weight` from `first` on."""
        ...


class Unquantized:
    """Weights in the model's dtype."""

    def format_of(self, name: str) -> WeightFormat:
        return FLOAT

    def parameters(self, weight: Weight, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": FloatRows(weight, first, count)}


class WeightFactory:
    """Makes a model's weights, by a method, in a dtype on a device, and notes what of the checkpoint fills them.

    Names are those of the checkpoint; `ops` is what layers compute with.
    """

    def __init__(self, method: Method, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.ops, self.dtype, self.device = ops, dtype, device
        self.parameters: dict[str, Parameter] = {}
        """Every tensor that the checkpoint must hold for what was made so far, by its name."""
        self._method = method
        self._above = ""

    def at(self, name: str) -> "WeightFactory":
        """This factory, for names below `name`."""
        below = copy.copy(self)
        below._above = f"{self._above}{name}."
        return below

    def linear(self, names: tuple[str, ...], sizes: tuple[int, ...], columns: int, *, gated: bool = False) -> LinearMap:
        """The weight of linear maps with as many rows as `sizes` say, without content.

        One name a map where the checkpoint keeps them apart; a single name where it, too, has them as one. Maps in
        different formats are weights of their own, joined; neighbours in one format share one.
        """
        parts = []
        maps = self._named(names, sizes)
        for format, run in groupby(maps, key=lambda named: self._method.format_of(named[0])):
            alike = list(run)
            weight = self._new_weight(
                sum(size for _, size in alike), columns, format, gated=gated and len(alike) == len(maps)
            )
            first = 0
            for name, size in alike:
                self.parameters.update(self._method.parameters(weight, name, first, size))
                first += size
            parts.append(weight)
        return parts[0] if len(parts) == 1 else JoinedWeight(parts, gated=gated)

    def head(self, name: str, rows: int, columns: int) -> Weight:
        """A weight that is one precise map and may be looked up in as well, without content.

        What rounding costs in quality is the output projection's in large part, and few rows go through it.
        """
        full = f"{self._above}{name}"
        weight = self._new_weight(rows, columns, self._method.format_of(full), gated=False, precise=True)
        self.parameters.update(self._method.parameters(weight, full, 0, rows))
        return weight

    def bias(self, names: tuple[str, ...], sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The biases of linear maps, one after another, without content; names and sizes as those of `linear`."""
        made, first = self.empty(sum(sizes), dtype=dtype), 0
        for name, size in self._named(names, sizes):
            self.parameters[f"{name}.bias"] = TensorParameter(made[first : first + size])
            first += size
        return made

    def embedding(self, name: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        """A table without content, as what looks up rows of it: row_ids [n] int64 -> [n, columns]."""
        if self._method.format_of(f"{self._above}{name}") is not FLOAT:
            return self.head(name, rows, columns).lookup
        table = self.tensor(f"{name}.weight", rows, columns)
        return partial(self.ops.gather, table)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that the checkpoint holds under this very name, without content."""
        made = self.empty(*shape)
        self.parameters[f"{self._above}{name}"] = TensorParameter(made)
        return made

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the factory's type unless `dtype` says otherwise; nothing of the checkpoint fills it."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _new_weight(
        self, rows: int, columns: int, format: WeightFormat, *, gated: bool, precise: bool = False
    ) -> Weight:
        return self.ops.new_weight(
            rows, columns, format, gated=gated, dtype=self.dtype, device=self.device, precise=precise
        )

    def _named(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> list[tuple[str, int]]:
        """The full name and the rows of each map that the checkpoint has."""
        sizes = sizes if len(names) > 1 else (sum(sizes),)
        return [(f"{self._above}{name}", size) for name, size in zip(names, sizes, strict=True)]
