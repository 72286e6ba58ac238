"""How a checkpoint's tensors become the weights of linear maps."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.feed_forward import Activation
from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.linear.reference import ReferenceWeight
from penstock.kernels.linear.weight import LinearMap, Packable, Packed, Weight, activation_of
from penstock.kernels.lora import LoraTable
from penstock.kernels.ops import Ops
from penstock.quantization.rows import Fillable, MapRows, OwnRows, PickedRows, Piece, RowRun, own_runs
from penstock.weight_formats import FLOAT, WeightFormat

REFUSED = "cannot be quantized: it has weights that are infinite, not numbers or far too large"


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
    """A tensor that is kept as it is, in the target's type, or times a factor, with a number added to it."""

    def __init__(self, target: Tensor, offset: float = 0.0, factor: float = 1.0) -> None:
        self.shape: tuple[int, ...] = tuple(target.shape)
        self._target, self._offset, self._factor = target, offset, factor

    def load(self, first: int, rows: Tensor) -> None:
        if self._offset or self._factor != 1.0:
            rows = rows.float() * self._factor + self._offset
        self._target[first : first + len(rows)].copy_(rows)


class TapsParameter:
    """The taps of a convolution of each channel, [channels, 1, kernel] in the checkpoint and tap after tap here."""

    def __init__(self, target: Tensor) -> None:
        """`target` [kernel, channels]."""
        kernel, channels = target.shape
        self.shape: tuple[int, ...] = (channels, 1, kernel)
        self._target = target

    def load(self, first: int, rows: Tensor) -> None:
        self._target[:, first : first + len(rows)].copy_(rows[:, 0].T)


class FloatRows:
    """Rows of a weight that the checkpoint holds as floating point, and here the kernel, too."""

    def __init__(self, weight: Fillable, first: int, count: int) -> None:
        self.shape: tuple[int, ...] = (count, weight.columns)
        self.weight, self.first = weight, first

    def load(self, first: int, rows: Tensor) -> None:
        self.weight.load(self.first + first, rows)


def packed_tensor(tensor: Tensor) -> Packed:
    """A tensor as what can be kept."""
    return Packed(f"{tensor.dtype} {list(tensor.shape)}", (tensor.contiguous().view(-1).view(torch.uint8),))


def kept_tensor(kept: Packed, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """The tensor that `packed_tensor` was given, in the memory that was kept; None: it is another one."""
    bytes = math.prod(shape) * dtype.itemsize
    if kept.form != f"{dtype} {list(shape)}" or [part.nbytes for part in kept.parts] != [bytes]:
        return None
    return kept.parts[0].view(dtype).view(shape)


class GatheredWeight(ReferenceWeight):
    """A matrix, stored in any format, that goes to a caller in floating point once all of its rows have come."""

    def __init__(
        self, rows: int, columns: int, format: WeightFormat, dtype: torch.dtype, take: Callable[[Tensor], None]
    ) -> None:
        self._begin(0, columns, format, dtype)
        self.rows, self._missing, self._take = rows, rows, take

    def _begin(self, rows: int, columns: int, format: WeightFormat, dtype: torch.dtype) -> None:
        super().__init__(rows, columns, format, gated=False, dtype=dtype, device=torch.device("cpu"))

    def load(self, first: int, rows: Tensor | Quantized) -> None:
        if self._missing == self.rows:  # no memory is taken before
            self._begin(self.rows, self.columns, self.format, self.bias_dtype)
        super().load(first, rows)
        self._missing -= len(rows if isinstance(rows, Tensor) else rows.values)
        if not self._missing:
            self._take(self.lookup(torch.arange(self.rows)))
            total = self.rows
            self._begin(0, self.columns, self.format, self.bias_dtype)
            self.rows = total


class Method(Protocol):
    """One way to store linear maps: in which format the kernel gets each, and what the checkpoint holds for it."""

    rounds: bool
    """Whether the checkpoint holds them in floating point, which is rounded as it is loaded."""

    def format_of(self, name: str) -> WeightFormat:
        """The format of the matrix that the checkpoint calls `name`, without `.weight`."""
        ...

    def parameters(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        """The tensors of the checkpoint's matrix `name`, whose rows are `count` of `weight` from `first` on."""
        ...


class Unquantized:
    """Weights in the model's dtype."""

    rounds = False

    def format_of(self, name: str) -> WeightFormat:
        return FLOAT

    def parameters(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": FloatRows(weight, first, count)}


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Where what an adapter has for a matrix of the checkpoint goes."""

    table: LoraTable
    first: int
    """Row of the table's weight that the matrix begins with."""
    runs: tuple[RowRun, ...]
    """The rows of the matrix that the weight has."""


class WeightFactory:
    """Makes a model's weights, by a method, in a dtype on a device, and notes what of the checkpoint fills them.

    Names and sizes are those of the checkpoint; `ops` is what layers compute with. Of what is made here a rank has its
    own rows, as `own_runs` says, unless they are to be `whole`.
    """

    def __init__(
        self,
        method: Method,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        kept: Callable[[str], Packed | None] = lambda name: None,
        *,
        takes_adapters: bool = False,
    ) -> None:
        """
        Args:
            takes_adapters: whether linear layers have tables of what adapters add to them.
            kept: what an earlier load made of the weight or tensor of a name in `made`, if that was kept.
        """
        self.ops, self.dtype, self.device = ops, dtype, device
        self.ranks = ops.exchange.ranks
        self.parameters: dict[str, Parameter] = {}
        """Every tensor that the checkpoint must hold for what was made so far, by its name."""
        self.made: dict[str, Weight | Tensor] = {}
        """Every weight and tensor that parameters fill, by a name of its own."""
        self.filled: set[str] = set()
        """Names of parameters whose weights are filled already."""
        self.adapted: dict[str, AdaptedRows] = {}
        """Every matrix of the checkpoint that adapters may add to, by its name."""
        self._takes_adapters = takes_adapters
        self._method = method
        self._kept = kept
        self._above = ""
        self._precise = False

    def precise(self) -> "WeightFactory":
        """This factory, for weights whose integers meet activations of 15 bits (see `NewWeight`).

        It suits maps that few rows go through, and whose rounding shows in the logits at once.
        """
        precise = copy.copy(self)
        precise._precise = True
        return precise

    def at(self, name: str) -> "WeightFactory":
        """This factory, for names below `name`."""
        below = copy.copy(self)
        below._above = f"{self._above}{name}."
        return below

    def linear(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        columns: int,
        *,
        gated: bool = False,
        activation: Activation | None = None,
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
    ) -> LinearMap:
        """The weight of linear maps with as many rows as `sizes` say, without content.

        One name a map where the checkpoint keeps them apart; a single name where it, too, has them as one. Maps in
        different formats are weights of their own, joined; neighbours in one format share one. `activation` is that of
        the gate, or of what a single map without a gate gives; None: silu where gated, else none. `pieces` are those of
        each name; None: the sizes.
        """
        parts = []
        maps = self._named(names, sizes, pieces, whole)
        for format, run in groupby(maps, key=lambda named: self._method.format_of(named.name)):
            alike = list(run)
            alone = len(alike) == len(maps)
            parts.append(
                self._new_weight(
                    alike, columns, format, gated=gated and alone, activation=activation if alone else None
                )
            )
        return parts[0] if len(parts) == 1 else JoinedWeight(parts, activation_of(activation, gated=gated))

    def lora(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        columns: int,
        *,
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
    ) -> LoraTable | None:
        """What adapters add to the maps of `linear` of these arguments; None: there are no adapters."""
        if not self._takes_adapters:
            return None
        maps = self._named(names, sizes, pieces, whole)
        table, first = self.ops.new_lora(sum(rows.kept for rows in maps), columns, self.dtype, self.device), 0
        for rows in maps:
            self.adapted[rows.name] = AdaptedRows(table, first, rows.runs)
            first += rows.kept
        return table

    def reorder_rows(self, name: str, runs: tuple[RowRun, ...]) -> None:
        """Have the checkpoint's matrix `name`, made before, take its rows in another order.

        Raises:
            CheckpointError: it is stored in blocks of several rows.
        """
        full, count = f"{self._above}{name}.", sum(run.rows for run in runs)
        for key, parameter in self.parameters.items():
            if key.startswith(full):
                if parameter.shape[:1] != (count,):
                    raise CheckpointError(f"{key} cannot be read: it is of several rows, which have another order here")
                self.parameters[key] = PickedRows(parameter, runs)

    def matrix(self, name: str, rows: int, columns: int) -> Weight:
        """A weight that is one map and may be looked up in as well, without content."""
        (rows_of,) = self._named((name,), (rows,))
        return self._new_weight([rows_of], columns, self._method.format_of(rows_of.name), gated=False)

    def weight_of(self, name: str, rows: int, columns: int) -> Weight:
        """A weight that is made of the checkpoint's matrix `name`: by `load_into`, as nothing fills it by itself.

        It is of the format that the matrix is rounded to; of a matrix that is quantized already, in floating point.
        """
        format = self._method.format_of(f"{self._above}{name}") if self._method.rounds else FLOAT
        return self.ops.new_weight(rows, columns, format, gated=False, dtype=self.dtype, device=self.device)

    def add_parameter(self, name: str, parameter: Parameter) -> None:
        """Have a matrix of the checkpoint, by its name without `.weight`, go to a parameter of the caller's.

        Raises:
            CheckpointError: it is quantized.
        """
        full = f"{self._above}{name}"
        if not self._method.rounds and self._method.format_of(full) is not FLOAT:
            raise CheckpointError(f"{full} is quantized; that is not supported of this matrix")
        self.parameters[f"{full}.weight"] = parameter

    def load_into(self, weight: Weight, rows: Tensor) -> None:
        """Fill such a weight with `rows` [rows, columns] in floating point.

        Raises:
            CheckpointError: they cannot be rounded; the message goes on after a tensor's name.
        """
        made = rows if weight.format is FLOAT else self.ops.quantize(rows, weight.format)
        if made is None:
            raise CheckpointError(REFUSED)
        weight.load(0, made)

    def whole_matrix(self, name: str, rows: int, columns: int, take: Callable[[Tensor], None]) -> None:
        """Have the checkpoint's matrix `name`, without `.weight`, go to `take` once all of it is there.

        `take` gets [rows, columns] in floating point, whatever the checkpoint stores it as.
        """
        full = f"{self._above}{name}"
        format = FLOAT if self._method.rounds else self._method.format_of(full)
        whole = GatheredWeight(rows, columns, format, self.dtype if format is FLOAT else torch.float32, take)
        parameters: dict[str, Parameter] = {f"{full}.weight": FloatRows(whole, 0, rows)}
        if format is not FLOAT:
            parameters = self._method.parameters(whole, full, 0, rows)
        self.parameters.update(parameters)

    def bias(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        *,
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
    ) -> Tensor:
        """The biases of linear maps, one after another, without content; names and sizes as those of `linear`."""
        maps = self._named(names, sizes, pieces, whole)
        made = self.empty(sum(rows.kept for rows in maps), dtype=dtype)
        self._fill_bias(maps, made)
        return made

    def fill_bias(self, names: tuple[str, ...], sizes: tuple[int, ...], bias: Tensor) -> None:
        """Note that the biases of these maps fill `bias`, one after another."""
        self._fill_bias(self._named(names, sizes), bias)

    def _fill_bias(self, maps: Sequence[MapRows], bias: Tensor) -> None:
        first = 0
        for rows in maps:
            self.parameters[f"{rows.name}.bias"] = self._of_rows(TensorParameter(bias[first : first + rows.kept]), rows)
            first += rows.kept

    def embedding(self, name: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        """A table without content, as what looks up rows of it: row_ids [n] int64 -> [n, columns].

        Ids are those of this rank's rows.
        """
        if self._method.format_of(f"{self._above}{name}") is not FLOAT:
            return self.matrix(name, rows, columns).lookup
        table = self.tensor(f"{name}.weight", rows, columns, pieces=(Piece(rows),))
        return partial(self.ops.gather, table)

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype | None = None,
        offset: float = 0.0,
        factor: float = 1.0,
        pieces: tuple[Piece, ...] | None = None,
    ) -> Tensor:
        """A tensor that the checkpoint holds by this very name, filled if it was kept; `dtype` as that of `empty`.

        It is multiplied by `factor`, and `offset` added to it. Every rank has all of it, unless it is made of `pieces`.
        """
        rows = self._rows(name, pieces or (Piece(shape[0], whole=True),))
        made = self._tensor(name, (rows.kept, *shape[1:]), dtype or self.dtype)
        self.parameters[rows.name] = self._of_rows(TensorParameter(made, offset, factor), rows)
        return made

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """The weight of a norm: in float32 where an offset is added, as it would round the rest away."""
        return self.tensor(f"{name}.weight", size, dtype=torch.float32 if offset else None, offset=offset)

    def float32(self, name: str, *pieces: Piece | int) -> Tensor:
        """A tensor of one axis in float32 whatever the model's type: what a state depends on over many tokens."""
        divided = tuple(piece if isinstance(piece, Piece) else Piece(piece) for piece in pieces)
        return self.tensor(name, sum(piece.rows for piece in divided), dtype=torch.float32, pieces=divided)

    def taps(self, name: str, pieces: tuple[Piece, ...], kernel: int) -> Tensor:
        """The taps [kernel, channels] float32 of a convolution per channel; the channels are in these pieces."""
        rows = self._rows(f"{name}.weight", pieces)
        made = self._tensor(f"{name}.weight", (kernel, rows.kept), torch.float32)
        self.parameters[rows.name] = self._of_rows(TapsParameter(made), rows)
        return made

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the factory's type unless `dtype` says otherwise; nothing of the checkpoint fills it."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor for the parameter `name`, filled if it was kept."""
        full = f"{self._above}{name}"
        kept = self._kept(full)
        made = None if kept is None else kept_tensor(kept, shape, dtype)
        if made is None:
            made = self.empty(*shape, dtype=dtype)
        else:
            self.filled.add(full)
        self.made[full] = made
        return made

    def _new_weight(
        self,
        maps: Sequence[MapRows],
        columns: int,
        format: WeightFormat,
        *,
        gated: bool,
        activation: Activation | None = None,
    ) -> Weight:
        """The weight of maps, filled if it was kept."""
        weight = self.ops.new_weight(
            sum(rows.kept for rows in maps),
            columns,
            format,
            gated=gated,
            activation=activation,
            dtype=self.dtype,
            device=self.device,
            precise=self._precise,
        )
        parameters: dict[str, Parameter] = {}
        first = 0
        for rows in maps:
            if rows.kept == rows.num_rows:
                parameters.update(self._method.parameters(weight, rows.name, first, rows.num_rows))
            else:
                parameters.update(self._method.parameters(OwnRows(weight, first, rows), rows.name, 0, rows.num_rows))
            first += rows.kept
        self.parameters.update(parameters)
        own_name = "+".join(rows.name for rows in maps)
        self.made[own_name] = weight
        kept = self._kept(own_name)
        if kept is not None and isinstance(weight, Packable) and weight.adopt(kept):
            self.filled.update(parameters)
        return weight

    def _named(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
    ) -> list[MapRows]:
        """The rows of each map of the checkpoint: one map a size, or one for all of them."""
        if pieces is None:
            each = tuple(Piece(size, whole) for size in sizes)
            pieces = tuple((piece,) for piece in each) if len(names) > 1 else (each,)
        return [self._rows(name, of_map) for name, of_map in zip(names, pieces, strict=True)]

    def _rows(self, name: str, pieces: tuple[Piece, ...]) -> MapRows:
        """The full name of a tensor that is made of these pieces, and which of its rows are kept."""
        count = sum(piece.rows for piece in pieces)
        return MapRows(f"{self._above}{name}", count, own_runs(self.ranks, pieces))

    @staticmethod
    def _of_rows(parameter: Parameter, rows: MapRows) -> Parameter:
        return parameter if rows.kept == rows.num_rows else PickedRows(parameter, rows.runs, rows.num_rows)
