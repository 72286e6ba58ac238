"""y = x Wᵀ + b. `reference.py` is the truth; `packed.py` calls the native kernel."""

import torch

from penstock import native
from penstock.kernels.linear.packed import PackedWeight
from penstock.kernels.linear.reference import ReferenceWeight
from penstock.kernels.linear.weight import GROUP, Weight
from penstock.memory import WeightKind

__all__ = ["GROUP", "Weight", "WeightKind", "new_weight"]


def new_weight(
    rows: int, columns: int, kind: WeightKind, *, gated: bool, dtype: torch.dtype, device: torch.device
) -> Weight:
    """A weight without content for the best kernel there is; see `Weight` for the arguments."""
    if device.type == "cpu" and native.supports(dtype) and native.library() is not None:
        return PackedWeight(rows, columns, kind, gated=gated, dtype=dtype)
    return ReferenceWeight(rows, columns, kind, gated=gated, dtype=dtype, device=device)
