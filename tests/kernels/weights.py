"""Random rows of weights in every integer format."""

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.linear.quantized import Quantized
from penstock.weight_formats import StoredType, WeightFormat


def random_integers(rows: int, columns: int, format: WeightFormat, seed: int = 0) -> Quantized:
    """Weights of about 0.01 to 1."""
    rng = np.random.default_rng(seed)
    groups, supers = format.num_groups(columns), format.num_supers(columns)
    under = format.super_type is not None
    zeros = {"zero": 2**format.bits, "fraction": 128, "minimum": 64, "centre": 0}[format.offset]

    def stored(type: StoredType, count: int, most: float) -> Tensor:
        if type.endswith("int8"):
            whole = rng.integers(-127 if type == "int8" else 0, 128 if type == "int8" else int(most), (rows, count))
            return torch.from_numpy(whole).to(getattr(torch, type))
        return torch.from_numpy(rng.uniform(most / 10, most, (rows, count))).to(getattr(torch, type))

    return Quantized(
        torch.from_numpy(rng.integers(0, 2**format.bits, (rows, columns), np.uint8)),
        stored(format.scale, groups, 64 if under else 1 / 2**format.bits),
        None
        if format.offset_type is None
        else stored(format.offset_type, groups, zeros if under or format.offset != "minimum" else 0.5),
        None if format.super_type is None else stored(format.super_type, supers, 1 / 2**format.bits / 64),
        stored(format.super_type, supers, 0.5 / 64) if format.super_type and format.offset == "minimum" else None,
    )
