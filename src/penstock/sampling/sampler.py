"""Logits in, tokens out: one call a step, whatever each row asks for.

    processors     bias, penalties, bans and masks change single logits, and are undone at the end
    Ops.sample     temperature, top_k, top_p, min_p, typical_p, and a draw
    logprobs       of the logits as they came

A control costs nothing to the rows that do without it.
"""

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import NO_TOKEN_LEFT, NOT_FINITE, SampleBatch, StepResult
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import Controls
from penstock.request import TokenLogprob
from penstock.sampling.logprobs import token_logprobs
from penstock.sampling.processors import may_rule_out_all, processed
from penstock.sampling.random import uniforms

_COLDEST = 1e-30
"""Lower temperatures would be a float32's zero; from far above on, only tokens as likely as the likeliest remain."""


def sample(ops: Ops, logits: Tensor, batch: SampleBatch) -> StepResult:
    """Choose a token for each row.

    Args:
        ops: of the logits' device.
        logits: [num_samples, vocab] float32, contiguous. A row that is masked, and of which no log-probabilities are
            wanted, may be another after the call; all others are the same.
        batch: the rows' parameters, with the keys of their random numbers.

    Returns:
        A token a row; NOT_FINITE where a logit is NaN or +inf, or all are -inf; NO_TOKEN_LEFT where all are -inf under
        the row's controls. Log-probabilities are those of the logits as given, before any control; None for rows that
        did not ask or failed.
    """
    with processed(ops, logits, batch):
        tokens: list[int] = _choose(ops, logits, batch).tolist()
        for row, token in enumerate(tokens):
            if token < 0:
                none_left = may_rule_out_all(batch, row) and bool((logits[row] == -torch.inf).all())
                tokens[row] = NO_TOKEN_LEFT if none_left else NOT_FINITE
    return StepResult(tokens, _logprobs(ops, logits, batch, tokens))


def _choose(ops: Ops, logits: Tensor, batch: SampleBatch) -> Tensor:
    """[num_samples] int64; -1 where there is nothing to choose."""
    params = batch.params
    if all(p.temperature == 0 for p in params):
        return ops.argmax(logits)
    controls = Controls(
        temperature=np.array([max(p.temperature, _COLDEST) if p.temperature else 0.0 for p in params]),
        top_k=np.array([p.top_k for p in params], np.float64),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        typical_p=np.array([p.typical_p for p in params]),
        uniform=uniforms([p.seed for p in params], batch.indices, batch.positions),
    )
    return ops.sample(logits, controls)


def _logprobs(ops: Ops, logits: Tensor, batch: SampleBatch, tokens: list[int]) -> list[TokenLogprob | None] | None:
    asking = [row for row, params in enumerate(batch.params) if params.logprobs is not None]
    if not asking:
        return None
    logprobs: list[TokenLogprob | None] = [None] * len(batch)
    rows = [row for row in asking if tokens[row] >= 0]
    if rows:
        counts = [batch.params[row].logprobs or 0 for row in rows]
        some = logits if len(rows) == len(batch) else logits[rows]
        for row, entry in zip(rows, token_logprobs(ops, some, [tokens[row] for row in rows], counts), strict=True):
            logprobs[row] = entry
    return logprobs
