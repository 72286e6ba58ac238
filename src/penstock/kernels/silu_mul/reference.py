"""SwiGLU's activation (Shazeer, 2020, arXiv:2002.05202) in plain torch."""

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """`gate_up` [num_tokens, 2 * size], gate first -> silu(gate) * up [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
