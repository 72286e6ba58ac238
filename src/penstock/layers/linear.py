"""Linear layers. Weights are made without content; the loader fills what `parameters` hands it."""

from torch import Tensor

from penstock.quantization.base import Parameter, TensorParameter, WeightFactory


class Linear:
    """One or several linear maps of the same input, stored as one.

    weight  [sum(out_sizes), in_size]    bias  [sum(out_sizes)] or None

        | q q q q | k | v |        the rows of the maps, one after another

    `gated`: there are two maps, and the layer gives silu(first(x)) * second(x).
    """

    def __init__(
        self, in_size: int, out_sizes: tuple[int, ...], factory: WeightFactory, *, bias: bool, gated: bool = False
    ) -> None:
        self.out_sizes = out_sizes
        self.weight = factory.linear(sum(out_sizes), in_size, gated=gated)
        self.bias = factory.tensor(sum(out_sizes), dtype=self.weight.bias_dtype) if bias else None
        self._dtype = factory.dtype
        self._method = factory.method

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, in_size] -> [num_tokens, sum(out_sizes)], or a half of that if gated."""
        return self.weight.linear(x, self.bias, self._dtype)

    def parameters(self, names: tuple[str, ...]) -> dict[str, Parameter]:
        """The weights, and biases if it has them, by their names in the checkpoint.

        One name a map where the checkpoint keeps them apart; a single name where it, too, has them as one.
        """
        sizes = list(self.out_sizes) if len(names) > 1 else [sum(self.out_sizes)]
        named: dict[str, Parameter] = {}
        first = 0
        for name, size in zip(names, sizes, strict=True):
            named |= self._method.parameters(self.weight, name, first, size)
            if self.bias is not None:
                named[f"{name}.bias"] = TensorParameter(self.bias[first : first + size])
            first += size
        return named
