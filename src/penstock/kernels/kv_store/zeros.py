"""Memory for a cache."""

import math

import torch
from torch import Tensor

from penstock import reserve


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that the system zeroes when it is first touched: reserved now, and no time spent on it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(reserve.zeros(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
