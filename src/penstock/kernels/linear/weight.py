"""A linear map's weight as its kernel keeps it: what the layers above see of either version."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.feed_forward import Activation
from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.lora import LoraUpdate
from penstock.weight_formats import WeightFormat


@dataclass(frozen=True, slots=True)
class Packed:
    """A filled weight as the bytes that its kernel reads."""

    form: str
    """Which of the kernel's layouts they are in."""
    parts: tuple[Tensor, ...]
    """Each [bytes] uint8."""


@runtime_checkable
class Packable(Protocol):
    """A weight that can be kept as it is packed. Neither method may be called before a weight is made or filled."""

    def packed(self) -> Packed:
        """What it holds, in its own memory."""
        ...

    def adopt(self, packed: Packed) -> bool:
        """Use these parts in place, as read-only memory; False: they are not such a weight's."""
        ...


class LinearMap(Protocol):
    """What layers compute with: a weight, or several."""

    bias_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, update: LoraUpdate | None = None) -> Tensor:
        """`x` [num_tokens, columns] -> [num_tokens, rows] of `dtype`, or half the rows if gated; `bias` [rows].

        `update` is added in float32, as the bias is.
        """
        ...


class Weight(LinearMap, Protocol):
    """A weight [rows, columns], filled piece by piece.

    format      how it is kept
    gated       the rows are those of a gate, then as many of `up`: the map is act(gate(x)) * up(x)
    activation  that act; or one of what a map without a gate gives
    """

    rows: int
    columns: int
    format: WeightFormat
    gated: bool
    activation: Activation | None

    def load(self, first: int, rows: Tensor | Quantized) -> None:
        """Fill the rows from `first` on: of a floating type [n, columns] where the format is FLOAT, else integers."""
        ...

    def lookup(self, row_ids: Tensor) -> Tensor:
        """The rows `row_ids` [n] int64 -> [n, columns] of the model's dtype: an embedding."""
        ...

    def linear_into(
        self,
        out: Tensor,
        first: int,
        x: Tensor,
        bias: Tensor | None,
        *,
        column: int = 0,
        after_gate: Activation | None = None,
        update: LoraUpdate | None = None,
    ) -> None:
        """`linear` into the columns of `out` [num_tokens, any] from `first` on.

        `x` [num_tokens, any] has what is mapped in its columns from `column` on. With `after_gate` those of `out`
        hold a gate, and become after_gate(gate) * what the map gives.
        """
        ...


class NewWeight(Protocol):
    """Makes a weight without content; see `Weight` for the arguments.

    `precise`: integers meet activations of 15 bits, not 8. It takes twice the work, and no more memory to be read.
    """

    def __call__(
        self,
        rows: int,
        columns: int,
        format: WeightFormat,
        *,
        gated: bool,
        activation: Activation | None = None,
        dtype: torch.dtype,
        device: torch.device,
        precise: bool = False,
    ) -> Weight: ...


def activation_of(activation: Activation | None, *, gated: bool) -> Activation | None:
    """A weight's activation, where None says that of SwiGLU for gated ones."""
    assert activation != ("relu2" if gated else "clamped_swiglu")
    return activation or ("silu" if gated else None)
