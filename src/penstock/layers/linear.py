"""Linear layers. They allocate weights without content; the loader fills them by the names given here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from penstock.kernels.array_types import A

if TYPE_CHECKING:
    from penstock.config.feed_forward import Activation
    from penstock.kernels.lora.rows import AdapterRows
    from penstock.native.array import AnyDtype
    from penstock.quantization.base import WeightFactory
    from penstock.quantization.rows import Piece


class Linear(Generic[A]):
    """One or several linear layers of the same input, fused into one matrix.

    weight  [sum(out_sizes), in_size]    bias  [sum(out_sizes)] or None

        | q q q q | k | v |        the rows of the layers, concatenated

    `names` are their names in the checkpoint, or a single name if the checkpoint stores them fused. With `gated` there
    are two, and the output is act(first(x)) * second(x); for `activation` see `WeightFactory.linear`.

    With several ranks, each rank has a shard of the rows of every layer, and computes the corresponding columns.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        in_size: int,
        out_sizes: tuple[int, ...],
        factory: WeightFactory[A],
        *,
        bias: bool | tuple[bool, ...],
        gated: bool = False,
        activation: Activation | None = None,
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
        gather_input: bool = False,
        gather_output: bool = False,
        adaptable: bool = True,
        dtype: AnyDtype | None = None,
    ) -> None:
        """
        Args:
            bias: whether the layers have biases, or whether each has one.
            pieces: for each layer, how its rows are sharded, if not evenly by `out_sizes`.
            whole: whether the weight is replicated: every rank has all rows.
            gather_input: whether the input is sharded by columns, so that it is all-gathered first.
            gather_output: whether the output is all-gathered, so that every rank has all columns.
            adaptable: whether LoRA adapters can target it.
            dtype: of the output; None: the factory's.
        """
        self.weight = factory.linear(
            names, out_sizes, in_size, gated=gated, activation=activation, pieces=pieces, whole=whole
        )
        bias_dtype = self.weight.bias_dtype
        self.bias = None
        if bias:
            biased = bias if isinstance(bias, tuple) else None
            self.bias = factory.bias(names, out_sizes, bias_dtype, pieces=pieces, whole=whole, biased=biased)
        self._lora = None
        if adaptable:
            self._lora = factory.lora(names, out_sizes, in_size, self.weight, pieces=pieces, whole=whole)
        self._dtype, self._collective = dtype or factory.dtype, factory.ops.collective
        divided = factory.ranks.size > 1
        self._gathered_input = in_size if gather_input and divided else None
        self._gathered_output = sum(out_sizes) // (1 + gated) if gather_output and divided else None

    def __call__(self, x: A, adapters: AdapterRows | None = None) -> A:
        """`x` [num_tokens, in_size] -> [num_tokens, sum(out_sizes)], or half as many columns if gated.

        Args:
            adapters: the LoRA adapters of the rows of `x`.
        """
        if self._gathered_input is not None:
            x = self._collective.columns(x, self._gathered_input)
        update = None if self._lora is None or adapters is None else self._lora.update(x, adapters)
        y = self.weight.linear(x, self.bias, self._dtype, update)
        return y if self._gathered_output is None else self._collective.columns(y, self._gathered_output)


def output_linear(
    name: str,
    in_size: int,
    out_size: int,
    factory: WeightFactory[A],
    *,
    bias: bool = False,
    gather_input: bool = True,
    adaptable: bool = True,
) -> Linear[A]:
    """The last linear layer of a part: its input is usually sharded by columns, and its output is all-gathered."""
    return Linear(
        (name,),
        in_size,
        (out_size,),
        factory,
        bias=bias,
        gather_input=gather_input,
        gather_output=True,
        adaptable=adaptable,
    )
