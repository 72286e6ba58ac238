"""Linear layers, and the MLPs made of them. They allocate weights without content; the loader fills them by the names
given here.
"""

from torch import Tensor

from penstock.config.feed_forward import Activation
from penstock.kernels.lora.rows import AdapterRows
from penstock.layers.mlp_spec import GatedMLPSpec, PlainMLPSpec
from penstock.quantization.base import WeightFactory
from penstock.quantization.rows import Piece


class Linear:
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
        factory: WeightFactory,
        *,
        bias: bool,
        gated: bool = False,
        activation: Activation | None = None,
        pieces: tuple[tuple[Piece, ...], ...] | None = None,
        whole: bool = False,
        takes_own: bool = False,
        gives_all: bool = False,
    ) -> None:
        """
        Args:
            pieces: for each layer, how its rows are sharded, if not evenly by `out_sizes`.
            whole: whether the weight is replicated: every rank has all rows.
            takes_own: whether the input is sharded by columns, so that it is all-gathered first.
            gives_all: whether the output is all-gathered, so that every rank has all columns.
        """
        self.weight = factory.linear(
            names, out_sizes, in_size, gated=gated, activation=activation, pieces=pieces, whole=whole
        )
        bias_dtype = self.weight.bias_dtype
        self.bias = factory.bias(names, out_sizes, bias_dtype, pieces=pieces, whole=whole) if bias else None
        self._lora = factory.lora(names, out_sizes, in_size, pieces=pieces, whole=whole)
        self._dtype, self._collective = factory.dtype, factory.ops.collective
        divided = factory.ranks.size > 1
        self._taken = in_size if takes_own and divided else None
        self._given = sum(out_sizes) // (1 + gated) if gives_all and divided else None

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """`x` [num_tokens, in_size] -> [num_tokens, sum(out_sizes)], or half as many columns if gated.

        Args:
            adapters: the LoRA adapters of the rows of `x`.
        """
        if self._taken is not None:
            x = self._collective.columns(x, self._taken)
        update = None if self._lora is None or adapters is None else self._lora.update(x, adapters)
        y = self.weight.linear(x, self.bias, self._dtype, update)
        return y if self._given is None else self._collective.columns(y, self._given)


class GatedMLP:
    """down(activation(gate(x)) * up(x)), with gate and up fused into one matrix. See `FeedForward`."""

    def __init__(self, spec: GatedMLPSpec, factory: WeightFactory) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up = Linear(
            spec.gate_up, hidden, (inner, inner), factory, bias=spec.bias, gated=True, activation=spec.activation
        )
        self.down = Linear((spec.down,), inner, (hidden,), factory, bias=spec.bias, takes_own=True, gives_all=True)

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self.down(self.gate_up(x, adapters), adapters)


class PlainMLP:
    """down(activation(up(x))). See `FeedForward`."""

    def __init__(self, spec: PlainMLPSpec, factory: WeightFactory) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.up = Linear((spec.up,), hidden, (inner,), factory, bias=spec.bias, activation=spec.activation)
        self.down = Linear((spec.down,), inner, (hidden,), factory, bias=spec.bias, takes_own=True, gives_all=True)

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self.down(self.up(x, adapters), adapters)
