"""Log-probabilities under the model's logits, before any control, the same in every batch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.request import TokenLogprob
from penstock.sampling.weights import SCALE, leading_tokens, token_weights

WIDTH = 256
"""How many of a row's likeliest tokens are looked at, before all are."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of a token a row, and of the row's likeliest; NaN where logits are not finite.

    Args:
        logits: [num_rows, vocab] float32.
        token_ids: one a row.
        counts: how many of the likeliest to name in each row.
    """
    vocab = logits.shape[-1]
    k, width = min(max(counts), vocab), min(WIDTH, vocab)
    chosen = torch.tensor(token_ids, device=logits.device)
    facts = torch.empty(len(token_ids), 3 + 2 * k, dtype=torch.float64, device=logits.device)
    certain = torch.empty(len(token_ids), dtype=torch.bool, device=logits.device)
    for index in passes(range(len(token_ids)), logits):
        facts[index], certain[index] = gather(logits[index], chosen[index], k, width)
    again = (~certain).nonzero().squeeze(-1)
    if len(again):
        facts[again], _ = gather(logits[again], chosen[again], k, vocab)
    return read(facts.cpu().numpy(), token_ids, counts)


def passes(rows: Sequence[int], logits: Tensor) -> tuple[Tensor, ...]:
    """The rows in portions that bound the temporary memory, and on a CPU stay in its cache."""
    elements = 2**20 if logits.device.type == "cpu" else 2**25
    return torch.split(torch.tensor(rows, device=logits.device), max(1, elements // logits.shape[-1]))


def gather(logits: Tensor, token_ids: Tensor, k: int, width: int) -> tuple[Tensor, Tensor]:
    """What the log-probabilities of a token a row, and of the row's k likeliest, are made of.

    Args:
        logits: [num_rows, vocab] float32.
        token_ids: [num_rows]; anything below 0 stands for token 0.
        k: at most `width`.
        width: how many of the likeliest to look at, to put equal ones in order.

    Returns:
        facts [num_rows, 3 + 2 k] float64, which holds token ids and float32 exactly: the token's logit, the largest,
        the total weight, the k largest logits, their tokens; and [num_rows] bool, False for a row in which tokens that
        equal the k-th likeliest may have been overlooked.
    """
    top = logits.amax(-1, keepdim=True)
    total = token_weights(logits, top, torch.ones_like(top)).sum(-1, keepdim=True)
    parts = [logits.gather(-1, token_ids.clamp_min(0).unsqueeze(-1)), top, total]
    certain = torch.ones_like(token_ids, dtype=torch.bool)
    if k:
        lead = leading_tokens(logits, width)
        parts += [lead.logits[:, :k], lead.token_ids[:, :k]]
        certain = lead.certain[:, k - 1]
    return torch.cat([part.double() for part in parts], dim=-1), certain


def read(facts: NDArray[np.float64], token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities from what `gather` found; NaN where logits were not finite.

    Args:
        facts: [num_rows, 3 + 2 k].
        counts: how many of the likeliest to name in each row.
    """
    k = (facts.shape[1] - 3) // 2
    with np.errstate(all="ignore"):  # rows that are not finite
        norm = facts[:, 1] + np.log(facts[:, 2] / SCALE)
        chosen = (facts[:, 0] - norm).tolist()
        best = (facts[:, 3 : 3 + k] - norm[:, None]).tolist()
        names = facts[:, 3 + k :].astype(np.int64).tolist()
    return [
        TokenLogprob(token, chosen[row], tuple(zip(names[row][:count], best[row][:count], strict=True)))
        for row, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]
