"""Linear layers. Weights are allocated without content; the loader fills the parts that `parts` hands it."""

import torch
from torch import Tensor

from penstock.kernels.linear import linear


class Linear:
    """One or several linear maps of the same input, stored as one.

    weight  [sum(out_sizes), in_size]    bias  [sum(out_sizes)] or None

        | q q q q | k | v |        the rows of the maps, one after another
    """

    def __init__(
        self, in_size: int, out_sizes: tuple[int, ...], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.out_sizes = out_sizes
        self.weight = torch.empty(sum(out_sizes), in_size, dtype=dtype, device=device)
        self.bias = torch.empty(sum(out_sizes), dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, in_size] -> [num_tokens, sum(out_sizes)]."""
        return linear(x, self.weight, self.bias)

    def parameters(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The weights, and biases if it has them, by their names in the checkpoint.

        One name a map where the checkpoint keeps them apart; a single name where it, too, has them as one.
        """
        sizes = list(self.out_sizes) if len(names) > 1 else [sum(self.out_sizes)]
        named = {f"{n}.weight": part for n, part in zip(names, torch.split(self.weight, sizes), strict=True)}
        if self.bias is not None:
            named |= {f"{n}.bias": part for n, part in zip(names, torch.split(self.bias, sizes), strict=True)}
        return named
