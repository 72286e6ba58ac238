"""Linear layers. Weights are made without content; the loader fills them by the names given here."""

from torch import Tensor

from penstock.feed_forward import Activation
from penstock.kernels.lora.rows import AdapterRows
from penstock.quantization.base import WeightFactory


class Linear:
    """One or several linear maps of the same input, stored as one.

    weight  [sum(out_sizes), in_size]    bias  [sum(out_sizes)] or None

        | q q q q | k | v |        the rows of the maps, one after another

    `names` are those of the maps in the checkpoint, or a single one where it, too, has them as one. `gated`: there are
    two maps, and the layer gives act(first(x)) * second(x); `activation` as that of `WeightFactory.linear`.
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
    ) -> None:
        self.out_sizes = out_sizes
        self.weight = factory.linear(names, out_sizes, in_size, gated=gated, activation=activation)
        self.bias = factory.bias(names, out_sizes, self.weight.bias_dtype) if bias else None
        self._lora = factory.lora(names, out_sizes, in_size)
        self._dtype = factory.dtype

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """`x` [num_tokens, in_size] -> [num_tokens, sum(out_sizes)], or a half of that if gated.

        `adapters`: those that the rows of `x` have.
        """
        update = None if self._lora is None or adapters is None else self._lora.update(x, adapters)
        return self.weight.linear(x, self.bias, self._dtype, update)
