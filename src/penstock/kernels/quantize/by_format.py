"""The quantizers by the format that they round to."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.linear.quantized import Quantized
from penstock.kernels.quantize import Int4, Int6, Int8
from penstock.weight_formats import WeightFormat

Quantize = Callable[[Tensor, WeightFormat], Quantized | None]


def quantize_by_format(
    int8: Callable[[Tensor], Int8 | None], int6: Callable[[Tensor], Int6 | None], int4: Callable[[Tensor], Int4 | None]
) -> Quantize:
    """The function that rounds a weight [out, in] to a format; it gives None where one is not finite or too large."""

    def quantize(weight: Tensor, format: WeightFormat) -> Quantized | None:
        if format.name == "int8":
            made8 = int8(weight)
            return None if made8 is None else Quantized(made8.q.view(torch.uint8) ^ 128, made8.scale.unsqueeze(1))
        if format.name == "int6_128":
            made6 = int6(weight)
            return None if made6 is None else Quantized((made6.q + 32).view(torch.uint8), made6.scale.half())
        assert format.name == "int4_128"
        made4 = int4(weight)
        return None if made4 is None else Quantized(made4.q, made4.scale.half(), made4.zero)

    return quantize
