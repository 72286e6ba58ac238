"""Log-probabilities under the model's logits, before any control, the same in every batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.kernels.sampling import SCALE
from penstock.request import TokenLogprob


def token_logprobs(ops: Ops, logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of a token a row, and of the row's likeliest; NaN where logits are not finite.

    Args:
        logits: [num_rows, vocab] float32.
        token_ids: one a row.
        counts: how many of the likeliest to name in each row.
    """
    found = ops.topk_logprobs(logits, min(max(counts), logits.shape[-1]))
    chosen = logits.gather(-1, torch.tensor(token_ids, device=logits.device).unsqueeze(-1)).squeeze(-1)
    columns = (chosen, found.top, found.total / SCALE, *found.logits.unbind(1), *found.token_ids.unbind(1))
    facts = torch.stack([column.double() for column in columns]).cpu().numpy()  # which holds all of them exactly
    with np.errstate(all="ignore"):  # rows that are not finite
        norm = np.where(np.isfinite(facts[1]), facts[1] + np.log(facts[2]), np.nan)
        values, names = np.split(facts[3:], 2)
        chosen_logprobs, best = (facts[0] - norm).tolist(), (values - norm).T.tolist()
    tokens = names.T.astype(np.int64).tolist()
    return [
        TokenLogprob(token, chosen_logprobs[row], tuple(zip(tokens[row][:count], best[row][:count], strict=True)))
        for row, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]
