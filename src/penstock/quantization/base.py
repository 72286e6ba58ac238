"""Allocates a model's weights, and maps the checkpoint's tensors to them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config.feed_forward import Activation
from penstock.config.weight_formats import ACTIVATION_GROUP, FLOAT, WeightFormat
from penstock.errors import CheckpointError
from penstock.kernels.array_types import A
from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.linear.weight import LinearMap, Packable, Packed, Weight, activation_of
from penstock.quantization.adapted import AdaptedEmbedding, AdaptedHeads, AdaptedRows
from penstock.quantization.parameters import (
    ConvolutionRows,
    FirstRepeated,
    FloatRows,
    GatheredMatrix,
    ReshapedParameter,
    TapsParameter,
    TapsPart,
    TensorParameter,
)
from penstock.quantization.rows import (
    Fillable,
    MapRows,
    OwnRows,
    Parameter,
    PickedRows,
    Piece,
    RowFactors,
    RowRun,
    ScaledRows,
    own_runs,
)

if TYPE_CHECKING:
    from penstock.kernels.lora import LookupTable, LoraTable
    from penstock.kernels.memory import ModelTensor
    from penstock.kernels.ops import Ops
    from penstock.native.array import AnyDtype

REFUSED = "cannot be quantized: it has weights that are infinite, NaN or too large"


class Method(Protocol):
    """A quantization method: the kernel format of each matrix, and the checkpoint tensors that it is loaded from."""

    quantizes_on_load: bool
    """Whether the checkpoint is floating point, and is quantized on loading."""

    def format_of(self, name: str) -> WeightFormat:
        """The kernel format of the matrix `name` (the checkpoint's name without `.weight`)."""
        ...

    def parameters(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        """Parameters of the checkpoint matrix `name`, which fill `count` rows of `weight` from `first` on."""
        ...


class Unquantized:
    """Weights in the model's dtype."""

    quantizes_on_load = False

    def format_of(self, name: str) -> WeightFormat:
        return FLOAT

    def parameters(self, weight: Fillable, name: str, first: int, count: int) -> dict[str, Parameter]:
        return {f"{name}.weight": FloatRows(weight, first, count)}


class WeightFactory(Generic[A]):
    """Allocates a model's weights for a quantization method, and records the checkpoint tensors that fill them.

    Names and sizes are those of the checkpoint; `ops` are the operations of the layers. Each rank gets its own shard of
    rows (see `own_runs`), unless a weight is `whole`.
    """

    def __init__(
        self,
        method: Method,
        ops: Ops[A],
        dtype: AnyDtype,
        device: str,
        lookup: Callable[[str], Packed | None] = lambda name: None,
        *,
        stored: AnyDtype | None = None,
        takes_adapters: bool = False,
    ) -> None:
        """
        Args:
            stored: dtype of floating-point matrices; None: `dtype`.
            takes_adapters: whether linear layers get LoRA tables.
            lookup: returns the packed form of a name in `made` from the cache of packed weights; None on a miss.
        """
        self.ops, self.dtype, self.device = ops, dtype, device
        self._float32 = ops.dtype("float32")
        self.logits_dtype = self._float32  # of the output projection's results, and of a router's
        self._stored = stored
        self.ranks = ops.collective.ranks
        self.parameters: dict[str, Parameter] = {}
        """All checkpoint tensors required so far, by name."""
        self.made: dict[str, Weight[A] | ModelTensor[A]] = {}
        """All weights and tensors allocated so far, by a unique name."""
        self.filled: set[str] = set()
        """Names of parameters that were filled from the cache of packed weights."""
        self.adapted: dict[str, AdaptedRows[A]] = {}
        """All checkpoint matrices that adapters can target, by name."""
        self.adapted_heads: dict[str, AdaptedHeads[A]] = {}
        """Those that are used head by head, by name."""
        self.adapted_embeddings: dict[str, AdaptedEmbedding[A]] = {}
        """All embeddings that adapters can target, by name."""
        self._takes_adapters = takes_adapters
        self._method = method
        self._lookup = lookup
        self._above = ""
        self._precise_bits: int | None = None

    def precise(self, *, least_bits: int = 0) -> WeightFactory[A]:
        """A copy of this factory that makes precise weights: activations are quantized to 15 bits (see `NewWeight`).

        For weights of fewer than `least_bits` bits, activations keep 8 bits, in groups of `ACTIVATION_GROUP` columns.
        Meant for layers that process few rows and whose rounding errors reach the logits directly.
        """
        # Shallow: the copy records into the same tables as this factory.
        precise = copy.copy(self)
        precise._precise_bits = least_bits
        return precise

    def _is_precise(self, format: WeightFormat) -> bool:
        return self._precise_bits is not None and format.bits >= self._precise_bits

    def include(self, other: WeightFactory[A]) -> None:
        """Take on what another factory has allocated, to be loaded with this one's."""
        self.parameters.update(other.parameters)
        self.made.update(other.made)
        self.filled |= other.filled

    def at(self, name: str) -> WeightFactory[A]:
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
    ) -> LinearMap[A]:
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
            # With `gate` and `up` in different weights, `JoinedWeight` applies the activation.
            alone = len(alike) == len(maps)
            parts.append(
                self._new_weight(
                    alike, columns, format, gated=gated and alone, activation=activation if alone else None
                )
            )
        if len(parts) == 1:
            return parts[0]
        return JoinedWeight(parts, activation_of(activation, gated=gated), self.ops.empty_rows)

    def lora(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        columns: int,
        weight: LinearMap[A],
        *,
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
    ) -> LoraTable[A] | None:
        """Allocate the LoRA table of `weight`, which `linear` made with these arguments; None without adapters."""
        if not self._takes_adapters:
            return None
        maps = self._named(names, sizes, pieces, whole)
        table = self.ops.new_lora(sum(rows.kept for rows in maps), columns, self.dtype, self.device)
        self._adapt(maps, table, weight)
        return table

    def expert_lora(
        self,
        experts: str,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        columns: int,
        weights: Sequence[LinearMap[A]],
        *,
        top_k: int,
        interleaved: bool = False,
    ) -> Sequence[LoraTable[A]] | None:
        """Allocate the LoRA tables of a mixture's weights, one for each expert; None without adapters.

        Args:
            experts: the prefix of the experts' names, which a number and one of `names` follow.
            top_k: experts of a token.
            interleaved: whether an adapter of all experts together has the rows of the maps in turn.
        """
        if not self._takes_adapters:
            return None
        of_experts = [self.at(f"{experts}.{index}")._named(names, sizes) for index in range(len(weights))]
        num_rows = sum(rows.kept for rows in of_experts[0])
        tables = self.ops.new_expert_lora(len(weights), num_rows, columns, self.dtype, self.device)
        for maps, table, weight in zip(of_experts, tables, weights, strict=True):
            self._adapt(maps, table, weight)
        return tables

    def _adapt(self, maps: Sequence[MapRows], table: LoraTable[A], weight: LinearMap[A]) -> None:
        first = 0
        for rows in maps:
            self.adapted[rows.name] = AdaptedRows(table, first, rows.runs, weight)
            first += rows.kept

    def head_lora(
        self, name: str, num_heads: int, key_dim: int, value_dim: int, columns: int
    ) -> AdaptedHeads[A] | None:
        """Allocate the LoRA tables of a matrix [num_heads * (key_dim + value_dim), columns]; None without adapters."""
        if not self._takes_adapters:
            return None
        heads = self.ranks.own(num_heads)
        new = partial(self.ops.new_lora, dtype=self.dtype, device=self.device)
        keys, values = (tuple(new(*shape) for _ in heads) for shape in ((columns, key_dim), (value_dim, columns)))
        adapted = AdaptedHeads(keys, values, heads, key_dim, value_dim)
        self.adapted_heads[f"{self._above}{name}"] = adapted
        return adapted

    def lookup_table(self, name: str, rows: int, columns: int, num_ids: int | None = None) -> LookupTable[A] | None:
        """Allocate the table of the LoRA updates of an embedding [rows, columns]; None without adapters.

        `num_ids`: see `AdaptedEmbedding.rows`; None: `rows`.
        """
        if not self._takes_adapters:
            return None
        table = self.ops.new_lookup_table(columns, self.dtype, self.device)
        self.adapted_embeddings[f"{self._above}{name}"] = AdaptedEmbedding(table, num_ids or rows)
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

    def reshape(self, name: str, shape: tuple[int, ...]) -> None:
        """Load the tensor `name`, allocated before, from this shape, whose first dimension is 1."""
        full = f"{self._above}{name}"
        self.parameters[full] = ReshapedParameter(self.parameters[full], shape)

    def skip_rows(self, name: str, count: int) -> None:
        """Load the matrix `name`, allocated before, without the checkpoint's first `count` rows."""
        for key, parameter in self.parameters.items():
            if count and key.startswith(f"{self._above}{name}."):
                rows = parameter.shape[0]
                self.parameters[key] = PickedRows(parameter, (RowRun(count, 0, rows),), count + rows)

    def load_convolution(self, name: str, in_size: int, width: int) -> None:
        """Load the matrix `name`, allocated before, from a convolution's weights; see `ConvolutionRows`.

        Raises:
            CheckpointError: the weights are quantized in the checkpoint.
        """
        full = f"{self._above}{name}.weight"
        if full not in self.parameters:
            raise CheckpointError(f"{full} is quantized, which is not supported for a convolution")
        self.parameters[full] = ConvolutionRows(self.parameters[full], in_size, width)

    def repeat_first_row(self, name: str, rows: int) -> None:
        """Load the matrix `name`, allocated before, from one of `rows` rows; the others become its first one."""
        for key, parameter in self.parameters.items():
            if key.startswith(f"{self._above}{name}."):
                self.parameters[key] = FirstRepeated(parameter, rows)

    def scale_rows(self, name: str, factors: str, count: int) -> None:
        """Load the checkpoint's matrix `name` of `count` rows and its bias, which were allocated before, times the
        vector `factors`, a factor a row.
        """
        full, scaled = f"{self._above}{name}.", RowFactors(count)
        self.parameters[f"{self._above}{factors}"] = scaled
        keys = [key for key in self.parameters if key.startswith(full)]
        # The cached weights are scaled already, so the factors are not read.
        if self.filled.issuperset(keys):
            self.filled.add(f"{self._above}{factors}")
        for key in keys:
            self.parameters[key] = ScaledRows(self.parameters[key], scaled)

    def matrix(self, name: str, rows: int, columns: int) -> Weight[A]:
        """Allocate the weight of a single linear layer; it also supports row lookup, as an embedding."""
        (rows_of,) = self._named((name,), (rows,))
        return self._new_weight([rows_of], columns, self._method.format_of(rows_of.name), gated=False)

    def weight_of(self, name: str, rows: int, columns: int) -> Weight[A]:
        """Allocate a weight that is derived from the checkpoint's matrix `name`; the caller fills it with `load_into`.

        Its format is the one that the matrix is quantized to on loading; floating point if the checkpoint itself is
        quantized.
        """
        format = self._method.format_of(f"{self._above}{name}") if self._method.quantizes_on_load else FLOAT
        return self.ops.new_weight(
            rows, columns, format, gated=False, dtype=self.dtype, stored=self._stored, device=self.device
        )

    def derived(self, name: str, rows: int, columns: int, make: Callable[[Weight[A]], Parameter]) -> Weight[A]:
        """As `weight_of`, of the only weight that is derived from the matrix, filled on a cache hit.

        Args:
            make: makes the parameter that fills the weight.

        Raises:
            CheckpointError: the matrix is quantized.
        """
        weight, full = self.weight_of(name, rows, columns), f"{self._above}{name}"
        self.made[full] = weight
        packed = self._lookup(full)
        if packed is not None and isinstance(weight, Packable) and weight.adopt(packed):
            self.filled.add(f"{full}.weight")
        self.add_parameter(name, make(weight))
        return weight

    def derived_tensor(
        self, name: str, shape: tuple[int, ...], make: Callable[[A], Parameter], dtype: AnyDtype | None = None
    ) -> A:
        """Allocate a tensor that is derived from the checkpoint tensor `name`, filled on a cache hit.

        Args:
            make: makes the parameter that fills the tensor.
            dtype: None: the factory's dtype.
        """
        full = f"{self._above}{name}"
        made = self._tensor(full, shape, dtype or self.dtype)
        self.parameters[full] = make(made)
        return made

    def add_parameter(self, name: str, parameter: Parameter) -> None:
        """Load the checkpoint's matrix `name` (without `.weight`) into the caller's own parameter.

        Raises:
            CheckpointError: the matrix is quantized.
        """
        full = f"{self._above}{name}"
        if not self._method.quantizes_on_load and self._method.format_of(full) is not FLOAT:
            raise CheckpointError(f"{full} is quantized, which is not supported for this matrix")
        self.parameters[f"{full}.weight"] = parameter

    def load_into(self, weight: Weight[A], rows: NDArray[Any]) -> None:
        """Fill a weight from `weight_of` with floating-point `rows` [rows, columns], quantizing them if needed.

        Raises:
            CheckpointError: the rows cannot be quantized; the caller puts the tensor's name before the message.
        """
        made = rows if weight.format is FLOAT else self.ops.quantize(rows, weight.format)
        if made is None:
            raise CheckpointError(REFUSED)
        self.ops.store(weight, 0, made)

    def whole_matrix(self, name: str, rows: int, columns: int, take: Callable[[NDArray[Any]], None]) -> None:
        """Pass the checkpoint's matrix `name` (without `.weight`) to `take` once it is completely loaded.

        `take` gets [rows, columns] in floating point, dequantized if necessary.
        """
        full = f"{self._above}{name}"
        # Where weights are quantized on load, that is done to what `take` makes of the matrix.
        format = FLOAT if self._method.quantizes_on_load else self._method.format_of(full)
        whole = GatheredMatrix(rows, columns, format, take)
        parameters: dict[str, Parameter] = {f"{full}.weight": FloatRows(whole, 0, rows)}
        if format is not FLOAT:
            parameters = self._method.parameters(whole, full, 0, rows)
        self.parameters.update(parameters)

    def bias(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        dtype: AnyDtype,
        *,
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
        biased: tuple[bool, ...] | None = None,
    ) -> A:
        """Allocate the concatenated biases of linear layers, filled on a cache hit; names and sizes as in `linear`.

        Args:
            biased: whether each layer has a bias; the others get zeros. None: all have one.
        """
        maps = self._named(names, sizes, pieces, whole)
        filled = [f"{rows.name}.bias" for rows in itertools.compress(maps, biased or (True,) * len(maps))]
        total = sum(rows.kept for rows in maps)
        made = self._tensor("+".join(filled), (total,), dtype, *filled)
        # No tensor of the checkpoint fills the rows of layers without a bias.
        if biased is not None and not self.filled.issuperset(filled):
            self.ops.store(made, 0, np.zeros(total, np.float32))
        self._fill_bias(maps, made, biased)
        return made

    def fill_bias(self, names: tuple[str, ...], sizes: tuple[int, ...], bias: A) -> None:
        """Load the biases of these linear layers into `bias`, concatenated."""
        self._fill_bias(self._named(names, sizes), bias)

    def _fill_bias(self, maps: Sequence[MapRows], bias: A, biased: tuple[bool, ...] | None = None) -> None:
        first = 0
        for rows, has_bias in zip(maps, biased or (True,) * len(maps), strict=True):
            if has_bias:
                target = TensorParameter(self.ops.store, bias[first : first + rows.kept])
                self.parameters[f"{rows.name}.bias"] = self._of_rows(target, rows)
            first += rows.kept

    def embedding(self, name: str, rows: int, columns: int) -> Callable[[A], A]:
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
        dtype: AnyDtype | None = None,
        offset: float = 0.0,
        factor: float = 1.0,
        pieces: tuple[Piece, ...] | None = None,
    ) -> A:
        """Allocate the checkpoint tensor `name`, filled on a cache hit.

        Args:
            dtype: None: the factory's dtype.
            offset: added on loading.
            factor: multiplied with on loading, before the offset.
            pieces: how the rows are sharded; None: every rank has the whole tensor.
        """
        rows = self._rows(name, pieces or (Piece(shape[0], whole=True),))
        made = self._tensor(rows.name, (rows.kept, *shape[1:]), dtype or self.dtype)
        self.parameters[rows.name] = self._of_rows(TensorParameter(self.ops.store, made, offset, factor), rows)
        return made

    def norm(self, name: str, size: int, offset: float = 0.0) -> A:
        """Allocate the weight of a norm: in float32 if it has an offset, which would lose low bits in 16 bits."""
        return self.tensor(f"{name}.weight", size, dtype=self._float32 if offset else None, offset=offset)

    def float32(self, name: str, *pieces: Piece | int, factor: float = 1.0) -> A:
        """Allocate a 1-D tensor in float32, whatever the model's dtype, for values that act over many tokens.

        Args:
            factor: as in `tensor`.
        """
        divided = tuple(piece if isinstance(piece, Piece) else Piece(piece) for piece in pieces)
        total = sum(piece.rows for piece in divided)
        return self.tensor(name, total, dtype=self._float32, factor=factor, pieces=divided)

    def taps(
        self,
        name: str | tuple[str, ...],
        pieces: tuple[Piece, ...],
        kernel: int,
        factors: tuple[float, ...] | None = None,
    ) -> A:
        """Allocate the weights [kernel, channels] float32 of a depthwise convolution; `pieces` shard the channels.

        Args:
            name: a tuple if the checkpoint has a tensor for each piece.
            factors: multiplied with on loading, one for each piece.
        """
        names = (name,) if isinstance(name, str) else name
        rows = self._rows(f"{names[0]}.weight", pieces)
        made = self._tensor(rows.name, (kernel, rows.kept), self._float32)
        own = None
        if factors is not None:
            each = np.repeat(np.array(factors, np.float32), [piece.rows for piece in pieces])
            own = np.concatenate([each[run.given : run.given + run.rows] for run in rows.runs])
        whole = TapsParameter(self.ops.store, made, own)
        if len(names) == 1:
            self.parameters[rows.name] = self._of_rows(whole, rows)
            return made
        first, is_filled = 0, rows.name in self.filled
        for single, piece in zip(names, pieces, strict=True):
            part = self._rows(f"{single}.weight", (piece,))
            self.parameters[part.name] = self._of_rows(TapsPart(whole, first, part.kept), part)
            if is_filled:
                self.filled.add(part.name)
            first += part.kept
        return made

    def empty(self, *shape: int, dtype: AnyDtype | None = None) -> A:
        """Allocate a tensor on the factory's device that no checkpoint tensor fills; `dtype` defaults to its dtype."""
        return self.ops.new_tensor(shape, dtype or self.dtype, self.device).tensor

    def constant(self, values: NDArray[Any], dtype: AnyDtype | None = None) -> A:
        """A tensor with these values on the factory's device; `dtype` defaults to theirs."""
        return self.ops.constant(values, dtype, self.device)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: AnyDtype, *parameters: str) -> A:
        """Allocate a tensor, filled on a cache hit.

        Args:
            name: a unique one.
            parameters: complete names of those that fill it; (): that of the tensor.
        """
        made = self.ops.new_tensor(shape, dtype, self.device, self._lookup(name))
        if made.is_filled:
            self.filled.update(parameters or (name,))
        self.made[name] = made
        return made.tensor

    def _new_weight(
        self,
        maps: Sequence[MapRows],
        columns: int,
        format: WeightFormat,
        *,
        gated: bool,
        activation: Activation | None = None,
    ) -> Weight[A]:
        """Allocate the weight of fused layers, filled on a cache hit."""
        # A long group of activations has one scale for all: the largest of them costs the others bits.
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
        # The names of all layers in it, so that the cache does not find a weight that joins others.
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
