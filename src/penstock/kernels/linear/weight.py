"""The interfaces of weights and linear layers that reference and native kernels share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.config.feed_forward import Activation
from penstock.config.weight_formats import WeightFormat
from penstock.dataclass import dataclass
from penstock.kernels.array_types import A
from penstock.kernels.linear.quantized import Quantized

if TYPE_CHECKING:
    from penstock.kernels.lora import LoraUpdate
    from penstock.native.array import AnyDtype


@dataclass(frozen=True, slots=True)
class Packed:
    """A loaded weight in its kernel's memory layout, as bytes."""

    form: str
    """Identifies the layout."""
    parts: tuple[NDArray[np.uint8], ...]
    """Each [bytes]."""


@runtime_checkable
class Packable(Protocol):
    """A weight whose packed form can be cached. `packed` requires a loaded weight."""

    def packed(self) -> Packed:
        """The packed form, sharing the weight's memory."""
        ...

    def adopt(self, packed: Packed) -> bool:
        """Use this packed form in place, as read-only memory; returns False if its layout or size does not match."""
        ...


class LinearMap(Protocol[A]):
    """A linear layer: one weight, or several that are joined."""

    bias_dtype: AnyDtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def linear(self, x: A, bias: A | None, dtype: AnyDtype, update: LoraUpdate[A] | None = None) -> A:
        """`x` [num_tokens, columns] -> [num_tokens, rows] in `dtype`, or half as many columns if gated.

        `bias` [rows] and the LoRA `update` are added in float32.
        """
        ...


class Weight(LinearMap[A], Protocol[A]):
    """A weight [rows, columns], loaded piece by piece.

    format      its storage format
    gated       the first half of the rows is `gate`, the second half `up`: the layer computes act(gate(x)) * up(x)
    activation  that act; or the activation of the output, without a gate
    """

    rows: int
    columns: int
    format: WeightFormat
    gated: bool
    activation: Activation | None

    def load(self, first: int, rows: NDArray[Any] | Quantized) -> None:
        """Load rows from `first` on: floating point [n, columns] if the format is FLOAT, otherwise quantized rows."""
        ...

    def lookup(self, row_ids: A) -> A:
        """Embedding lookup: `row_ids` [n] int64 -> [n, columns] in the model's dtype."""
        ...

    def linear_into(
        self,
        out: A,
        first: int,
        x: A,
        bias: A | None,
        *,
        column: int = 0,
        after_gate: Activation | None = None,
        update: LoraUpdate[A] | None = None,
    ) -> None:
        """Like `linear`, but write the result to the columns of `out` [num_tokens, any] from `first` on.

        Args:
            column: first column of the input in `x` [num_tokens, any].
            after_gate: the target columns contain a gate, and become after_gate(gate) * linear(x).
        """
        ...


class NewWeight(Protocol[A]):
    """Allocates a weight without content; see `Weight` for the arguments.

    `precise`: activations are quantized to 15 bits instead of 8 for integer formats, at twice the work and the same
    memory traffic.
    `stored`: dtype of the elements of a floating-point weight; None: `dtype`, the model's.
    """

    def __call__(
        self,
        rows: int,
        columns: int,
        format: WeightFormat,
        *,
        gated: bool,
        activation: Activation | None = None,
        dtype: AnyDtype,
        stored: AnyDtype | None = None,
        device: str,
        precise: bool = False,
    ) -> Weight[A]: ...


def activation_of(activation: Activation | None, *, gated: bool) -> Activation | None:
    """A weight's activation; None stands for silu (SwiGLU) if gated, else for no activation."""
    assert activation != ("relu2" if gated else "clamped_swiglu")
    return activation or ("silu" if gated else None)
