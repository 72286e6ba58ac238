"""Logits in, tokens out: one call a step, whatever each row asks for.

    rows at temperature 0              argmax
    rows with temperature, min_p       weights of the whole vocabulary, one draw
    rows with top_p, no top_k          the likeliest few, and the total of the whole vocabulary
    rows with top_k (and top_p)        the likeliest few only

A control costs nothing to the rows that do without it. "The likeliest few" are `WIDTH` tokens; a row for which these
do not settle the matter is done again with the whole vocabulary (weights.py: where both can tell, they tell the same).
A draw cumulates the weights by ascending token id, whichever way they were found.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import SampleBatch, StepResult
from penstock.kernels.argmax import argmax
from penstock.request import ResolvedParams, TokenLogprob
from penstock.sampling.logprobs import WIDTH, gather, passes, read
from penstock.sampling.random import uniforms
from penstock.sampling.weights import all_candidates, draw, likely_candidates, token_weights

_FAILED = -1
_UNDECIDED = -2
_COLDEST = 1e-30
"""Lower temperatures would be a float32's zero; from far above on, only tokens as likely as the likeliest remain."""


def sample(logits: Tensor, batch: SampleBatch) -> StepResult:
    """Choose a token for each row.

    Args:
        logits: [num_samples, vocab] float32; the same after the call as before.
        batch: the rows' parameters, with the keys of their random numbers.

    Returns:
        A token a row, -1 where a logit is NaN or +inf, or all are -inf. Log-probabilities are those of the logits as
        given, before any control; None for rows that did not ask or failed.
    """
    return _sample(logits, batch, min(WIDTH, logits.shape[-1]))


def _sample(logits: Tensor, batch: SampleBatch, width: int) -> StepResult:
    banned = _banned_tokens(batch)
    if banned:
        place = torch.tensor(banned, device=logits.device).unbind(1)
        spared = logits[place]
        logits[place] = torch.where(spared < torch.inf, -torch.inf, spared)  # NaN and +inf stay, to be noticed
    tokens = _choose(logits, batch, width)
    if banned:
        logits[place] = spared
    asking = [row for row, params in enumerate(batch.params) if params.logprobs is not None]
    if asking:
        facts = _gather_logprobs(logits, tokens, asking, batch, width)
        packed = torch.cat((tokens.double(), facts.flatten()))  # float64 holds token ids and float32 exactly
        result = _read(packed.cpu().numpy(), asking, batch)
    else:
        result = StepResult(tokens.tolist())
    return _settle(result, logits, batch)


def _settle(result: StepResult, logits: Tensor, batch: SampleBatch) -> StepResult:
    """Do the undecided rows again with the whole vocabulary, and merge what comes out."""
    again = [row for row, token in enumerate(result.token_ids) if token == _UNDECIDED]
    if not again:
        return result
    part = SampleBatch(
        rows=[batch.rows[row] for row in again],
        params=[batch.params[row] for row in again],
        indices=[batch.indices[row] for row in again],
        positions=[batch.positions[row] for row in again],
        histories=[batch.histories[row] for row in again],
        prompt_lens=[batch.prompt_lens[row] for row in again],
        sequence_ids=[batch.sequence_ids[row] for row in again],
    )
    wider = _sample(logits[again], part, logits.shape[-1])
    for place, row in enumerate(again):
        result.token_ids[row] = wider.token_ids[place]
        if result.logprobs is not None and wider.logprobs is not None:
            result.logprobs[row] = wider.logprobs[place]
    return result


def _banned_tokens(batch: SampleBatch) -> list[tuple[int, int]]:
    """(row, token): the stop tokens of rows that have not reached their min_tokens."""
    early = (
        (row, p.stop_token_ids)
        for row, (p, position, prompt) in enumerate(zip(batch.params, batch.positions, batch.prompt_lens, strict=True))
        if position - prompt < p.min_tokens
    )
    return [(row, token) for row, stops in early for token in stops]


@dataclass(frozen=True, slots=True)
class _Controls:
    """The rows' parameters on the logits' device, each [num_rows, 1]."""

    temperature: Tensor
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    uniform: Tensor

    @classmethod
    def put(cls, batch: SampleBatch, device: torch.device) -> "_Controls":
        params = batch.params
        numbers = uniforms([p.seed for p in params], batch.indices, batch.positions)
        table = np.array([(max(p.temperature, _COLDEST), p.min_p, p.top_p, p.top_k) for p in params]).T
        columns = torch.from_numpy(np.vstack((table, numbers))).to(device).unsqueeze(-1)
        temperature, min_p, top_p, top_k, uniform = columns.unbind()
        return cls(temperature.float(), min_p.float(), top_p, top_k.long(), uniform)

    def of(self, rows: Tensor) -> "_Controls":
        return _Controls(*(c[rows] for c in (self.temperature, self.min_p, self.top_p, self.top_k, self.uniform)))


_Method = Callable[[Tensor, _Controls, int], Tensor]


def _choose(logits: Tensor, batch: SampleBatch, width: int) -> Tensor:
    """[num_samples] int64 tokens, or _FAILED, or _UNDECIDED."""
    if all(params.temperature == 0 for params in batch.params):
        return argmax(logits)
    controls = _Controls.put(batch, logits.device)
    tokens = torch.empty(len(batch), dtype=torch.int64, device=logits.device)
    for method, rows in _by_method(batch.params, logits.shape[-1]).items():
        for index in passes(rows, logits):
            tokens[index] = method(logits[index], controls.of(index), width)
    return tokens


def _by_method(params: list[ResolvedParams], vocab: int) -> dict[_Method, list[int]]:
    groups: dict[_Method, list[int]] = {}
    for row, p in enumerate(params):
        if p.temperature == 0:
            method: _Method = _take_likeliest
        elif 0 < p.top_k < vocab:
            method = _draw_top_k
        elif p.top_p < 1:
            method = _draw_top_p
        else:
            method = _draw_min_p if p.min_p > 0 else _draw_any
        groups.setdefault(method, []).append(row)
    return groups


def _take_likeliest(logits: Tensor, controls: _Controls, width: int) -> Tensor:
    return argmax(logits)


def _draw_any(logits: Tensor, controls: _Controls, width: int) -> Tensor:
    return _draw_from_all(logits, controls, min_p=None)


def _draw_min_p(logits: Tensor, controls: _Controls, width: int) -> Tensor:
    return _draw_from_all(logits, controls, controls.min_p)


def _draw_from_all(logits: Tensor, controls: _Controls, min_p: Tensor | None) -> Tensor:
    top = logits.amax(-1, keepdim=True)
    weights = token_weights(logits, top, controls.temperature, min_p)
    return draw(weights, controls.uniform).where(top.squeeze(-1).isfinite(), _FAILED)


def _draw_top_k(logits: Tensor, controls: _Controls, width: int) -> Tensor:
    return _draw_leading(logits, controls, controls.top_k, width)


def _draw_top_p(logits: Tensor, controls: _Controls, width: int) -> Tensor:
    return _draw_leading(logits, controls, None, width)


def _draw_leading(logits: Tensor, controls: _Controls, top_k: Tensor | None, width: int) -> Tensor:
    limits = (controls.temperature, top_k, controls.top_p, controls.min_p)
    if width > WIDTH:
        tokens = draw(all_candidates(logits, *limits), controls.uniform)
    else:
        found = likely_candidates(logits, *limits, width)
        place = draw(found.weights, controls.uniform).unsqueeze(-1)
        tokens = found.token_ids.gather(-1, place).squeeze(-1).where(found.decided, _UNDECIDED)
    return tokens.where(logits.amax(-1).isfinite(), _FAILED)


def _gather_logprobs(logits: Tensor, tokens: Tensor, rows: list[int], batch: SampleBatch, width: int) -> Tensor:
    """What log-probabilities are made of, a row for each that asks; `tokens` of rows with a tie become _UNDECIDED."""
    k = min(max(batch.params[row].logprobs or 0 for row in rows), logits.shape[-1])
    facts = []
    for index in passes(rows, logits):
        chosen = tokens[index]
        some, certain = gather(logits[index], chosen, k, width)
        tokens[index] = chosen.where(certain | (chosen < 0), _UNDECIDED)
        facts.append(some)
    return torch.cat(facts)


def _read(packed: NDArray[np.float64], asking: list[int], batch: SampleBatch) -> StepResult:
    """Tokens and log-probabilities from what came off the device."""
    tokens = packed[: len(batch)].astype(np.int64).tolist()
    facts = packed[len(batch) :].reshape(len(asking), -1)
    entries = read(facts, [tokens[row] for row in asking], [batch.params[row].logprobs or 0 for row in asking])
    logprobs: list[TokenLogprob | None] = [None] * len(batch)
    for row, entry in zip(asking, entries, strict=True):
        if tokens[row] >= 0:
            logprobs[row] = entry
    return StepResult(tokens, logprobs)
