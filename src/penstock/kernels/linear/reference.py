"""The linear map in plain torch."""

from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [num_tokens, in] times `weight` [out, in] transposed, plus `bias` [out] -> [num_tokens, out]."""
    return F.linear(x, weight, bias)
