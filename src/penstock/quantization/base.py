"""Allocates a model's weights, and maps the checkpoint's tensors to them."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.feed_forward import Activation
from penstock.config.weight_formats import ACTIVATION_GROUP, FLOAT, WeightFormat
from penstock.errors import CheckpointError
from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.linear.reference import ReferenceWeight
from penstock.kernels.linear.weight import LinearMap, Packable, Packed, Weight, activation_of
from penstock.kernels.lora import LoraTable
from penstock.kernels.ops import Ops
from penstock.quantization.rows import Fillable, MapRows, OwnRows, PickedRows, Piece, RowRun, own_runs

_LARGE_BYTES = 2**16
"""Minimum size of tensors that are allocated from the memory for packed weights, and so lie in their file."""
REFUSED = "cannot be quantized: it has weights that are infinite, NaN or too large"


class Parameter(Protocol):
    """The destination of one checkpoint tensor."""

    shape: tuple[int, ...]
    """The tensor's required shape in the checkpoint."""

    def load(self, first: int, rows: Tensor) -> None:
        """Load the tensor's rows from `first` on. Each row is loaded once, in any order.

        Raises:
            CheckpointError: the rows are invalid; the caller puts the tensor's name before the message.
        """
        ...


class TensorParameter:
    """A tensor that is converted to the target's dtype, optionally scaled by `factor` and shifted by `offset`."""

    def __init__(self, target: Tensor, offset: float = 0.0, factor: float = 1.0) -> None:
        self.shape: tuple[int, ...] = tuple(target.shape)
        self._target, self._offset, self._factor = target, offset, factor

    def load(self, first: int, rows: Tensor) -> None:
        if self._offset or self._factor != 1.0:
            rows = rows.float() * self._factor + self._offset
        self._target[first : first + len(rows)].copy_(rows)


class TapsParameter:
    """The weights of a depthwise convolution: [channels, 1, kernel] in the checkpoint, [kernel, channels] here."""

    def __init__(self, target: Tensor) -> None:
        """`target` [kernel, channels]."""
        kernel, channels = target.shape
        self.shape: tuple[int, ...] = (channels, 1, kernel)
        self._target = target

    def load(self, first: int, rows: Tensor) -> None:
        self._target[:, first : first + len(rows)].copy_(rows[:, 0].T)


class FloatRows:
    """Rows of a weight that is floating point both in the checkpoint and in the kernel."""

    def __init__(self, weight: Fillable, first: int, count: int) -> None:
        self.shape: tuple[int, ...] = (count, weight.columns)
        self.weight, self.first = weight, first

    def load(self, first: int, rows: Tensor) -> None:
        self.weight.load(self.first + first, rows)


def packed_tensor(tensor: Tensor) -> Packed:
    """A tensor in the form that the cache of packed weights stores."""
    return Packed(f"{tensor.dtype} {list(tensor.shape)}", (tensor.contiguous().view(-1).view(torch.uint8),))


def unpacked_tensor(packed: Packed, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """The inverse of `packed_tensor`, without a copy; None if shape or dtype do not match."""
    bytes = math.prod(shape) * dtype.itemsize
    if packed.form != f"{dtype} {list(shape)}" or [part.nbytes for part in packed.parts] != [bytes]:
        return None
    return packed.parts[0].view(dtype).view(shape)


class GatheredWeight(ReferenceWeight):
    """A matrix, stored in any format, that is passed to a callback in floating point once all its rows are loaded."""

    def __init__(
        self, rows: int, columns: int, format: WeightFormat, dtype: torch.dtype, take: Callable[[Tensor], None]
    ) -> None:
        self._begin(0, columns, format, dtype)
        self.rows, self._missing, self._take = rows, rows, take

    def _begin(self, rows: int, columns: int, format: WeightFormat, dtype: torch.dtype) -> None:
        super().__init__(rows, columns, format, gated=False, dtype=dtype, device=torch.device("cpu"))

    def load(self, first: int, rows: Tensor | Quantized) -> None:
        if self._missing == self.rows:  # allocate on the first rows only
            self._begin(self.rows, self.columns, self.format, self.bias_dtype)
        super().load(first, rows)
        self._missing -= len(rows if isinstance(rows, Tensor) else rows.values)
        if not self._missing:
            self._take(self.lookup(torch.arange(self.rows)))
            total = self.rows
            self._begin(0, self.columns, self.format, self.bias_dtype)
            self.rows = total


class Method(Protocol):
    """A quantization method: the kernel format of each matrix, and the checkpoint tensors that it is loaded from."""

    rounds: bool
    """Whether the checkpoint is floating point, and is quantized on loading."""

    def format_of(self, name: str) -> WeightFormat:
        """The kernel format of the matrix `name` (the checkpoint's name without `.weight`)."""
        ...

    def parameters(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        """Parameters of the checkpoint matrix `name`, which fill `count` rows of `weight` from `first` on."""
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
    """The destination of an adapter's LoRA matrices for one checkpoint matrix."""

    table: LoraTable
    first: int
    """First row of the matrix in the table's weight."""
    runs: tuple[RowRun, ...]
    """The rows of the matrix that this rank has."""
    order: tuple[RowRun, ...] = ()
    """Where the checkpoint's rows go before; (): they stay."""

    def own_rows(self, rows: Tensor) -> Tensor:
        """The rank's rows of `rows` [as in the checkpoint, any]."""
        if self.order:
            stored, rows = rows, torch.empty_like(rows)
            for run in self.order:
                rows[run.first : run.first + run.rows] = stored[run.given : run.given + run.rows]
        return torch.cat([rows[run.given : run.given + run.rows] for run in self.runs])


class WeightFactory:
    """Allocates a model's weights for a quantization method, and records the checkpoint tensors that fill them.

    Names and sizes are those of the checkpoint; `ops` are the operations of the layers. Each rank gets its own shard of
    rows (see `own_runs`), unless a weight is `whole`.
    """

    def __init__(
        self,
        method: Method,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        lookup: Callable[[str], Packed | None] = lambda name: None,
        *,
        stored: torch.dtype | None = None,
        takes_adapters: bool = False,
    ) -> None:
        """
        Args:
            stored: dtype of floating-point matrices; None: `dtype`.
            takes_adapters: whether linear layers get LoRA tables.
            lookup: returns the packed form of a name in `made` from the cache of packed weights; None on a miss.
        """
        self.ops, self.dtype, self.device = ops, dtype, device
        self.logits_dtype = torch.float32  # of the output projection's results, and of a router's
        self._stored = stored
        self.ranks = ops.collective.ranks
        self.parameters: dict[str, Parameter] = {}
        """All checkpoint tensors required so far, by name."""
        self.made: dict[str, Weight | Tensor] = {}
        """All weights and tensors allocated so far, by a unique name."""
        self.filled: set[str] = set()
        """Names of parameters that were filled from the cache of packed weights."""
        self.adapted: dict[str, AdaptedRows] = {}
        """All checkpoint matrices that adapters can target, by name."""
        self._takes_adapters = takes_adapters
        self._method = method
        self._lookup = lookup
        self._above = ""
        self._precise_bits: int | None = None

    def precise(self, *, least_bits: int = 0) -> "WeightFactory":
        """A copy of this factory that makes precise weights: activations are quantized to 15 bits (see `NewWeight`).

        For weights of fewer than `least_bits` bits, activations keep 8 bits, in groups of `ACTIVATION_GROUP` columns.
        Meant for layers that process few rows and whose rounding errors reach the logits directly.
        """
        precise = copy.copy(self)
        precise._precise_bits = least_bits
        return precise

    def _is_precise(self, format: WeightFormat) -> bool:
        return self._precise_bits is not None and format.bits >= self._precise_bits

    def at(self, name: str) -> "WeightFactory":
        """A copy of this factory whose names have the prefix `name`."""
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
        """Allocate the fused weight of several linear layers of the same input.

        Adjacent layers with the same format share one weight; weights of different formats are joined.

        Args:
            names: one name per layer, or a single name if the checkpoint stores them fused.
            sizes: output rows of each layer.
            activation: of the gate, or of the output if not gated; None: silu if gated, else none.
            pieces: for each name, how its rows are sharded; None: by `sizes`.
            whole: whether every rank has all rows.
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
        """Allocate the LoRA table of the layers that `linear` makes with these arguments; None without adapters."""
        if not self._takes_adapters:
            return None
        maps = self._named(names, sizes, pieces, whole)
        table, first = self.ops.new_lora(sum(rows.kept for rows in maps), columns, self.dtype, self.device), 0
        for rows in maps:
            self.adapted[rows.name] = AdaptedRows(table, first, rows.runs)
            first += rows.kept
        return table

    def reorder_rows(self, name: str, runs: tuple[RowRun, ...]) -> None:
        """Load the checkpoint's matrix `name`, which was allocated before, with its rows reordered.

        Raises:
            CheckpointError: the matrix is stored in blocks of several rows.
        """
        full, count = f"{self._above}{name}.", sum(run.rows for run in runs)
        if (adapted := self.adapted.get(full.removesuffix("."))) is not None:
            self.adapted[full.removesuffix(".")] = replace(adapted, order=runs)
        for key, parameter in self.parameters.items():
            if key.startswith(full):
                if parameter.shape[:1] != (count,):
                    raise CheckpointError(f"{key} cannot be read: its blocks of several rows cannot be reordered")
                self.parameters[key] = PickedRows(parameter, runs)

    def matrix(self, name: str, rows: int, columns: int) -> Weight:
        """Allocate the weight of a single linear layer; it also supports row lookup, as an embedding."""
        (rows_of,) = self._named((name,), (rows,))
        return self._new_weight([rows_of], columns, self._method.format_of(rows_of.name), gated=False)

    def weight_of(self, name: str, rows: int, columns: int) -> Weight:
        """Allocate a weight that is derived from the checkpoint's matrix `name`; the caller fills it with `load_into`.

        Its format is the one that the matrix is quantized to on loading; floating point if the checkpoint itself is
        quantized.
        """
        format = self._method.format_of(f"{self._above}{name}") if self._method.rounds else FLOAT
        return self.ops.new_weight(
            rows, columns, format, gated=False, dtype=self.dtype, stored=self._stored, device=self.device
        )

    def add_parameter(self, name: str, parameter: Parameter) -> None:
        """Load the checkpoint's matrix `name` (without `.weight`) into the caller's own parameter.

        Raises:
            CheckpointError: the matrix is quantized.
        """
        full = f"{self._above}{name}"
        if not self._method.rounds and self._method.format_of(full) is not FLOAT:
            raise CheckpointError(f"{full} is quantized, which is not supported for this matrix")
        self.parameters[f"{full}.weight"] = parameter

    def load_into(self, weight: Weight, rows: Tensor) -> None:
        """Fill a weight from `weight_of` with floating-point `rows` [rows, columns], quantizing them if needed.

        Raises:
            CheckpointError: the rows cannot be quantized; the caller puts the tensor's name before the message.
        """
        made = rows if weight.format is FLOAT else self.ops.quantize(rows, weight.format)
        if made is None:
            raise CheckpointError(REFUSED)
        weight.load(0, made)

    def whole_matrix(self, name: str, rows: int, columns: int, take: Callable[[Tensor], None]) -> None:
        """Pass the checkpoint's matrix `name` (without `.weight`) to `take` once it is completely loaded.

        `take` gets [rows, columns] in floating point, dequantized if necessary.
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
        """Allocate the concatenated biases of linear layers; names and sizes as in `linear`."""
        maps = self._named(names, sizes, pieces, whole)
        made = self.empty(sum(rows.kept for rows in maps), dtype=dtype)
        self._fill_bias(maps, made)
        return made

    def fill_bias(self, names: tuple[str, ...], sizes: tuple[int, ...], bias: Tensor) -> None:
        """Load the biases of these linear layers into `bias`, concatenated."""
        self._fill_bias(self._named(names, sizes), bias)

    def _fill_bias(self, maps: Sequence[MapRows], bias: Tensor) -> None:
        first = 0
        for rows in maps:
            self.parameters[f"{rows.name}.bias"] = self._of_rows(TensorParameter(bias[first : first + rows.kept]), rows)
            first += rows.kept

    def embedding(self, name: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        """Allocate an embedding table; returns its lookup: row_ids [n] int64 -> [n, columns].

        The ids index this rank's rows.
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
        """Allocate the checkpoint tensor `name`, filled on a cache hit.

        Args:
            dtype: None: the factory's dtype.
            offset: added on loading.
            factor: multiplied with on loading, before the offset.
            pieces: how the rows are sharded; None: every rank has the whole tensor.
        """
        rows = self._rows(name, pieces or (Piece(shape[0], whole=True),))
        made = self._tensor(name, (rows.kept, *shape[1:]), dtype or self.dtype)
        self.parameters[rows.name] = self._of_rows(TensorParameter(made, offset, factor), rows)
        return made

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """Allocate the weight of a norm: in float32 if it has an offset, which would lose low bits in 16 bits."""
        return self.tensor(f"{name}.weight", size, dtype=torch.float32 if offset else None, offset=offset)

    def float32(self, name: str, *pieces: Piece | int, factor: float = 1.0) -> Tensor:
        """Allocate a 1-D tensor in float32, whatever the model's dtype, for values that act over many tokens.

        Args:
            factor: as in `tensor`.
        """
        divided = tuple(piece if isinstance(piece, Piece) else Piece(piece) for piece in pieces)
        total = sum(piece.rows for piece in divided)
        return self.tensor(name, total, dtype=torch.float32, factor=factor, pieces=divided)

    def taps(self, name: str, pieces: tuple[Piece, ...], kernel: int) -> Tensor:
        """Allocate the weights [kernel, channels] float32 of a depthwise convolution; `pieces` shard the channels."""
        rows = self._rows(f"{name}.weight", pieces)
        made = self._tensor(f"{name}.weight", (kernel, rows.kept), torch.float32)
        self.parameters[rows.name] = self._of_rows(TapsParameter(made), rows)
        return made

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a tensor on the factory's device that no checkpoint tensor fills; `dtype` defaults to its dtype."""
        dtype = dtype or self.dtype
        size = math.prod(shape) * dtype.itemsize
        if self.device.type == "cpu" and size >= _LARGE_BYTES:
            return torch.from_numpy(self.ops.allocator.zeros(size, for_weights=True)).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def constant(self, values: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """A tensor with these values on the factory's device; `dtype` defaults to theirs."""
        return torch.from_numpy(values).to(self.device, dtype)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate the tensor of the parameter `name`, filled on a cache hit."""
        full = f"{self._above}{name}"
        packed = self._lookup(full)
        made = None if packed is None else unpacked_tensor(packed, shape, dtype)
        if made is not None:
            self.filled.add(full)
        else:
            made = self.empty(*shape, dtype=dtype)
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
        """Allocate the weight of fused layers, filled on a cache hit."""
        if self._precise_bits is not None and format.x_group > ACTIVATION_GROUP:
            format = replace(format, x_group=ACTIVATION_GROUP)
        weight = self.ops.new_weight(
            sum(rows.kept for rows in maps),
            columns,
            format,
            gated=gated,
            activation=activation,
            dtype=self.dtype,
            stored=self._stored,
            device=self.device,
            precise=self._is_precise(format),
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
        packed = self._lookup(own_name)
        if packed is not None and isinstance(weight, Packable) and weight.adopt(packed):
            self.filled.update(parameters)
        return weight

    def _named(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
    ) -> list[MapRows]:
        """The rows of each checkpoint matrix: one matrix per size, or one fused matrix."""
        if pieces is None:
            each = tuple(Piece(size, whole) for size in sizes)
            pieces = tuple((piece,) for piece in each) if len(names) > 1 else (each,)
        return [self._rows(name, of_map) for name, of_map in zip(names, pieces, strict=True)]

    def _rows(self, name: str, pieces: tuple[Piece, ...]) -> MapRows:
        """The full name of a tensor that consists of these pieces, and the rows that this rank has."""
        count = sum(piece.rows for piece in pieces)
        return MapRows(f"{self._above}{name}", count, own_runs(self.ranks, pieces))

    @staticmethod
    def _of_rows(parameter: Parameter, rows: MapRows) -> Parameter:
        return parameter if rows.kept == rows.num_rows else PickedRows(parameter, rows.runs, rows.num_rows)
