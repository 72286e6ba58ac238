"""A token for each row in plain torch.

Sums decide where a nucleus ends and which token is drawn. A sum of floats depends on its order, and the order that a
library picks depends on the batch. So a probability, relative to the row's likeliest token, becomes a fixed-point
integer, its weight: sums of those are exact in any order, on any device, and a row gets the same token in every batch.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.argmax.reference import argmax

SCALE = 2.0**40
"""The weight of a row's likeliest token; 2**22 of them add up in int64. Below 2**-40 of it, a token has no weight."""

_CHUNK = 128
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _TYPICAL_P, _UNIFORM = range(6)


def draw(logits: Tensor, controls: NDArray[np.float64]) -> Tensor:
    """See `penstock.kernels.draw`; `controls` [rows, 6], a column for each field of `Controls`."""
    tokens = argmax(logits)
    drawn = controls[:, _TEMPERATURE] > 0
    ordered = (controls[:, _TOP_K] > 0) | (controls[:, _TOP_P] < 1) | (controls[:, _TYPICAL_P] < 1)
    for group in (drawn & ~ordered, drawn & ordered):
        for rows in _portions(np.flatnonzero(group), logits):
            places, columns = (torch.from_numpy(part).to(logits.device) for part in (rows, controls[rows]))
            choice = invert(kept_weights(logits[places], columns), columns[:, _UNIFORM, None])
            tokens[places] = choice.where(tokens[places] >= 0, -1)
    return tokens


def _portions(rows: NDArray[np.int64], logits: Tensor) -> list[NDArray[np.int64]]:
    """The rows in portions that bound the temporary memory, and on a CPU stay in its cache."""
    size = max(1, (2**20 if logits.is_cpu else 2**25) // logits.shape[-1])
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def token_weights(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """The weight of every token at a temperature.

    Args:
        logits: [num_rows, vocab].
        top: [num_rows, 1], the largest logit of each row, finite.
        temperature: [num_rows, 1] float32, above 0.

    Returns:
        [num_rows, vocab] int64; a row's largest is `SCALE`.
    """
    return _to_fixed(_shares(logits, top, temperature))


def _shares(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    return (logits - top).div_(temperature).exp_()


def _to_fixed(shares: Tensor) -> Tensor:
    return (shares * SCALE).to(torch.int64)


def kept_weights(logits: Tensor, controls: Tensor) -> Tensor:
    """The weights of the tokens that the controls leave, 0 for all others.

    Args:
        logits: [num_rows, vocab], the largest of each row finite.
        controls: [num_rows, 6] float64.
    """
    column = [controls[:, field, None] for field in range(6)]
    temperature, min_p = column[_TEMPERATURE].float(), column[_MIN_P].float()
    top = logits.amax(-1, keepdim=True)
    shares = _shares(logits, top, temperature)
    kept = shares >= min_p
    if ((controls[:, _TOP_K] > 0) | (controls[:, _TOP_P] < 1)).any():
        kept &= _leading(logits, _to_fixed(shares), column[_TOP_K].long(), column[_TOP_P])
    shares.mul_(kept)
    if (controls[:, _TYPICAL_P] < 1).any():
        depths = (top - logits).div_(temperature)
        shares.mul_(_typical(shares, depths, column[_TYPICAL_P]))
    return _to_fixed(shares)


def _leading(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, vocab] bool: what top_k, then top_p leave."""
    vocab = logits.shape[-1]
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    last = (top_k - 1).clamp_max(vocab - 1).where(top_k > 0, vocab - 1)
    sorted_weights = weights.gather(-1, token_ids).mul_(ordered >= ordered.gather(-1, last))
    before = sorted_weights.cumsum(-1).sub_(sorted_weights)
    within = (before < top_p * sorted_weights.sum(-1, keepdim=True)) | (top_p >= 1)
    return torch.zeros_like(within).scatter_(-1, token_ids, within & (sorted_weights > 0))


def _typical(shares: Tensor, depths: Tensor, typical_p: Tensor) -> Tensor:
    """[num_rows, vocab] bool: what typical_p leaves, by the tokens' information above that of the likeliest."""
    weights = _to_fixed(shares)
    total = weights.sum(-1, keepdim=True)
    mean = _to_fixed(shares * depths.clamp_max(100)).sum(-1, keepdim=True).double() / total
    ranks = (depths - mean.float()).abs_()
    ordered, token_ids = ranks.sort(dim=-1)
    reached = weights.gather(-1, token_ids).cumsum(-1)
    last = (reached < typical_p * total).sum(-1, keepdim=True).clamp_max_(ranks.shape[-1] - 1)
    return (ranks <= ordered.gather(-1, last)) | (typical_p >= 1)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The place in each row that its random number falls on, by inversion of the cumulated weights.

    Args:
        weights: [num_rows, width] int64, not negative and not all 0.
        uniform: [num_rows, 1] float64 in [0, 1).

    Returns:
        [num_rows] int64, places with a weight above 0.
    """
    num_rows, width = weights.shape
    if width % _CHUNK:
        weights = pad(weights, (0, -width % _CHUNK))
    chunks = weights.view(num_rows, -1, _CHUNK)
    sums = chunks.sum(-1)
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    target = (uniform * total).to(torch.int64).minimum(total - 1)  # the product may round up to the total
    chunk = (ends <= target).sum(-1, keepdim=True).clamp_max_(sums.shape[-1] - 1)
    rest = target - (ends - sums).gather(-1, chunk)
    inside = chunks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, _CHUNK)).squeeze(1)
    place = chunk.squeeze(-1) * _CHUNK + (inside.cumsum(-1) <= rest).sum(-1)
    return place.clamp_max_(width - 1)
