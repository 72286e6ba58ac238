"""What may be drawn, and how likely: probabilities as whole numbers, and the draw from them.

Sums decide where a nucleus ends and which token is drawn. A sum of floats depends on its order, and the order that a
library picks depends on the batch. So a probability, relative to the row's likeliest token, becomes a fixed-point
integer: sums of those are exact in any order, on any device. Hence a row gets the same token in every batch, and a
search among the likeliest few tokens only, where that is enough, gives what a search of the vocabulary would give.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

SCALE = 2.0**40
"""The weight of a row's likeliest token; 2**22 of them add up in int64. Below 2**-40 of it, a token has no weight."""

_CHUNK = 128


class Candidates(NamedTuple):
    """The tokens that top_k, top_p and min_p leave of each row, by ascending id."""

    token_ids: Tensor  # [num_rows, width]
    weights: Tensor  # [num_rows, width] int64, 0 where a control drops the token
    decided: Tensor  # [num_rows] bool, False where `width` was too small to tell


class Leading(NamedTuple):
    """The largest logits of each row, descending, equal ones by ascending id."""

    logits: Tensor  # [num_rows, width]
    token_ids: Tensor  # [num_rows, width]
    certain: Tensor  # [num_rows, width] bool: no token left out could stand here


def token_weights(logits: Tensor, top: Tensor, temperature: Tensor, min_p: Tensor | None = None) -> Tensor:
    """The weight of every token after temperature and min_p.

    Args:
        logits: [num_rows, vocab].
        top: [num_rows, 1], the largest logit of each row, finite.
        temperature: [num_rows, 1] float32, above 0.
        min_p: [num_rows, 1] float32: tokens less likely than this share of the likeliest weigh nothing.

    Returns:
        [num_rows, vocab] int64; a row's largest is `SCALE`.
    """
    relative = (logits - top).div_(temperature).exp_()
    if min_p is not None:
        relative.mul_(relative >= min_p)
    return relative.mul_(SCALE).to(torch.int64)


def leading_tokens(logits: Tensor, width: int) -> Leading:
    """The `width` largest logits of each row [num_rows, vocab] in an order that is unique."""
    if width >= logits.shape[-1]:
        ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
        return Leading(ordered, token_ids, torch.ones_like(token_ids, dtype=torch.bool))
    found, token_ids = logits.topk(width, dim=-1)
    token_ids, order = token_ids.sort(dim=-1)
    ordered, order = found.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    # topk takes any of the tokens that equal the last one
    return Leading(ordered, token_ids.gather(-1, order), ordered > ordered[:, -1:])


def likely_candidates(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor, min_p: Tensor, width: int
) -> Candidates:
    """Apply temperature, top_k, top_p and min_p, in this order and as `transformers` defines them.

    A token as likely as the k-th likeliest survives top_k. Of equally likely tokens at the edge of the nucleus, top_p
    keeps those of lower id.

    Args:
        logits: [num_rows, vocab], each row's largest one finite.
        temperature, min_p: [num_rows, 1] float32.
        top_k: [num_rows, 1], at least 1; or None for rows without it.
        top_p: [num_rows, 1] float64.
        width: how many of the likeliest tokens to look at.
    """
    lead = leading_tokens(logits, width)
    top = lead.logits[:, :1]
    weights = token_weights(lead.logits, top, temperature)
    if top_k is None:
        limit = top_p * token_weights(logits, top, temperature).sum(-1, keepdim=True)
        decided = weights.mul(lead.certain).sum(-1, keepdim=True) >= limit
    else:
        last = (top_k - 1).clamp_max(weights.shape[-1] - 1)
        weights.mul_(lead.logits >= lead.logits.gather(-1, last))
        limit = top_p * weights.sum(-1, keepdim=True)
        decided = lead.certain.gather(-1, last)
    kept = (weights.cumsum(-1) - weights < limit) & (weights >= min_p * SCALE)
    decided |= lead.certain[:, -1:]
    token_ids, order = lead.token_ids.sort(dim=-1)
    return Candidates(token_ids, weights.mul_(kept).gather(-1, order), decided.squeeze(-1))


def all_candidates(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As `likely_candidates`, however many tokens stay: the weights of the whole vocabulary, [num_rows, vocab]."""
    ordered = _descending(logits)
    top = ordered[:, :1]
    sorted_weights = token_weights(ordered, top, temperature)
    if top_k is not None:
        sorted_weights.mul_(ordered >= ordered.gather(-1, top_k - 1))
    limit = top_p * sorted_weights.sum(-1, keepdim=True)
    last = (sorted_weights.cumsum(-1) < limit).sum(-1, keepdim=True).clamp_max_(logits.shape[-1] - 1)
    edge = ordered.gather(-1, last)
    before = sorted_weights.mul_(ordered > edge).sum(-1, keepdim=True)
    weights = token_weights(logits, top, temperature)
    at_edge = weights * (logits == edge)
    kept = (logits > edge) | ((logits == edge) & (before + at_edge.cumsum(-1) - at_edge < limit))
    return weights.mul_(kept.logical_and_(weights >= min_p * SCALE))


def _descending(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":  # numpy sorts floats alone 30 times as fast as torch sorts them with their places
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    return logits.sort(dim=-1, descending=True).values


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
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
