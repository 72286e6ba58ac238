"""Sampling in plain torch.

Sums decide where a nucleus ends and which token is drawn. A sum of floats depends on its order, and the order that a
library chooses depends on the batch. Therefore each probability, relative to the row's most likely token, is converted
to a fixed-point integer, its weight: integer sums are exact in any order and on any device, so a row gets the same
token in every batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.sampling import SCALE, Controls, CountTable, TopkLogprobs

_CHUNK = 128
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _TYPICAL_P, _UNIFORM = range(6)


def argmax(logits: Tensor) -> NDArray[np.int64]:
    """`logits` [rows, vocab] float32 -> [rows]: the lowest id among the largest logits.

    -1 for rows with NaN or plus infinity, or with minus infinity only.
    """
    return _on_host(_likeliest(logits))


def _on_host(x: Tensor) -> NDArray[Any]:
    host: NDArray[Any] = x.cpu().numpy()
    return host


def _likeliest(logits: Tensor) -> Tensor:
    top, tokens = logits.max(-1)  # ties go to the lower id; NaN counts as the largest
    return tokens.where(top.isfinite(), -1)


def sample(logits: Tensor, controls: Controls) -> NDArray[np.int64]:
    """`logits` [rows, vocab] float32 -> [rows] tokens.

    -1 for rows with NaN or plus infinity, or with minus infinity only.
    """
    table = np.stack(controls, axis=1)  # [rows, 6], one column per field
    tokens = _likeliest(logits)
    drawn = table[:, _TEMPERATURE] > 0
    ordered = (table[:, _TOP_K] > 0) | (table[:, _TOP_P] < 1) | (table[:, _TYPICAL_P] < 1)
    for group in (drawn & ~ordered, drawn & ordered):
        for rows in _portions(np.flatnonzero(group), logits):
            places, columns = (torch.from_numpy(part).to(logits.device) for part in (rows, table[rows]))
            choice = invert(kept_weights(logits[places], columns), columns[:, _UNIFORM, None])
            tokens[places] = choice.where(tokens[places] >= 0, -1)
    return _on_host(tokens)


def _portions(rows: NDArray[np.int64], logits: Tensor) -> list[NDArray[np.int64]]:
    """Split the rows to bound the temporary memory; on a CPU, to fit its cache."""
    size = max(1, (2**20 if logits.is_cpu else 2**25) // logits.shape[-1])
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def token_weights(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """The weight of each token at a temperature.

    Args:
        logits: [num_rows, vocab].
        top: [num_rows, 1], the largest logit of each row; finite.
        temperature: [num_rows, 1] float32, above 0.

    Returns:
        [num_rows, vocab] int64; the largest of each row is `SCALE`.
    """
    return _to_fixed(_shares(logits, top, temperature))


def _shares(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    return (logits - top).div_(temperature).exp_()


def _to_fixed(shares: Tensor) -> Tensor:
    return (shares * SCALE).to(torch.int64)


def kept_weights(logits: Tensor, controls: Tensor) -> Tensor:
    """The weights of the tokens that the controls keep, 0 for all others.

    Args:
        logits: [num_rows, vocab]; the largest of each row is finite.
        controls: [num_rows, 6] float64.
    """
    column = [controls[:, field, None] for field in range(6)]
    temperature, min_p = column[_TEMPERATURE].float(), column[_MIN_P].float()
    top = logits.amax(-1, keepdim=True)
    shares = _shares(logits, top, temperature)
    kept = shares >= min_p
    if ((controls[:, _TOP_K] > 0) | (controls[:, _TOP_P] < 1)).any():
        kept &= _nucleus(logits, _to_fixed(shares), column[_TOP_K].long(), column[_TOP_P])
    shares.mul_(kept)
    if (controls[:, _TYPICAL_P] < 1).any():
        depths = (top - logits).div_(temperature)
        shares.mul_(_typical(shares, depths, column[_TYPICAL_P]))
    return _to_fixed(shares)


def _nucleus(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, vocab] bool: the tokens that top_k, then top_p keep."""
    vocab = logits.shape[-1]
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    last = (top_k - 1).clamp_max(vocab - 1).where(top_k > 0, vocab - 1)
    sorted_weights = weights.gather(-1, token_ids).mul_(ordered >= ordered.gather(-1, last))
    before = sorted_weights.cumsum(-1).sub_(sorted_weights)
    within = (before < top_p * sorted_weights.sum(-1, keepdim=True)) | (top_p >= 1)
    return torch.zeros_like(within).scatter_(-1, token_ids, within & (sorted_weights > 0))


def _typical(shares: Tensor, depths: Tensor, typical_p: Tensor) -> Tensor:
    """[num_rows, vocab] bool: the tokens that typical_p keeps.

    Args:
        depths: the tokens' information relative to that of the most likely token.
    """
    weights = _to_fixed(shares)
    total = weights.sum(-1, keepdim=True)
    mean = _to_fixed(shares * depths.clamp_max(100)).sum(-1, keepdim=True).double() / total
    ranks = (depths - mean.float()).abs_()
    ordered, token_ids = ranks.sort(dim=-1)
    reached = weights.gather(-1, token_ids).cumsum(-1)
    last = (reached < typical_p * total).sum(-1, keepdim=True).clamp_max_(ranks.shape[-1] - 1)
    return (ranks <= ordered.gather(-1, last)) | (typical_p >= 1)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index from each row by inversion of the cumulative weights.

    Args:
        weights: [num_rows, width] int64, non-negative and not all 0.
        uniform: [num_rows, 1] float64 in [0, 1).

    Returns:
        [num_rows] int64, indices with a weight above 0.
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


def topk_logprobs(logits: Tensor, k: int) -> TopkLogprobs:
    """The `k` <= vocab most likely tokens of each row of `logits` [rows, vocab] float32."""
    top = logits.amax(-1, keepdim=True)
    total = token_weights(logits, top, torch.ones_like(top)).sum(-1)
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    return TopkLogprobs(*map(_on_host, (top.squeeze(-1), total, ordered[:, :k], token_ids[:, :k])))


def take(logits: Tensor, places: NDArray[np.int64]) -> NDArray[np.float32]:
    """The logits at these places of the flat tensor."""
    return _on_host(logits.view(-1)[torch.from_numpy(places).to(logits.device)])


def put(logits: Tensor, places: NDArray[np.int64], values: NDArray[np.float32]) -> None:
    """Replace the logits at these distinct places of the flat tensor."""
    index, given = (torch.from_numpy(column).to(logits.device) for column in (places, values))
    logits.view(-1).index_put_((index,), given)


def apply_bitmask(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> None:
    """Set the logits of disallowed tokens to minus infinity, in place.

    Args:
        logits: [num_rows, vocab] float32.
        rows: [num_masked], distinct row indices.
        bits: [num_masked, ceil(vocab / 32)]: one bit per token, lowest bit first; set: allowed.
    """
    assert bits.shape == (len(rows), -(-logits.shape[-1] // 32)), "the mask is not as wide as the logits"
    words = torch.from_numpy(bits).to(logits.device)
    allowed = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    place = torch.from_numpy(rows).to(logits.device)
    logits[place] = logits[place].masked_fill(allowed.flatten(1)[:, : logits.shape[-1]] == 0, -torch.inf)


def penalize(
    logits: Tensor,
    rows: NDArray[np.int64],
    penalties: NDArray[np.float64],
    tables: Sequence[CountTable],
    *,
    undo: bool,
) -> Callable[[], object] | None:
    """See `Ops.penalize`."""
    columns = zip(*tables, strict=True)
    tokens, totals, answers = (np.frombuffer(b"".join(column), np.int32).astype(np.int64) for column in columns)
    owners = np.repeat(np.arange(len(rows)), [len(table[0]) for table in tables])
    repetition, frequency, presence, share = penalties[owners].T
    of_answer = np.where(answers > 0, frequency * answers + presence, 0.0).astype(np.float32)
    of_all = (share * totals).astype(np.float32)
    device = logits.device
    assert logits.is_contiguous()
    flat, index = logits.view(-1), torch.from_numpy(rows[owners] * logits.shape[-1] + tokens).to(device)
    before = flat[index]
    factor = torch.from_numpy(np.where(totals > 0, repetition, 1.0).astype(np.float32)).to(device)
    after = torch.where(before < 0, before * factor, before / factor)
    flat[index] = after - torch.from_numpy(of_answer).to(device) - torch.from_numpy(of_all).to(device)
    return functools.partial(flat.index_put_, (index,), before) if undo else None
