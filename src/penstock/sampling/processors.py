"""What is done to logits before tokens are drawn from them.

In this order, that of `transformers`' `generate` (beside each the processor that it has there):

    logit_bias          added                                                     SequenceBiasLogitsProcessor
    repetition_penalty  divides logits above 0, multiplies others,                RepetitionPenaltyLogitsProcessor
                        of tokens in prompt or answer
    frequency_penalty   taken off for each time that the answer has a token       OpenAI's
    presence_penalty    taken off once, of tokens that the answer has             OpenAI's
    share_penalty       taken off, times the token's share of prompt and answer   TGI's frequency_penalty
    bad words, tokens   a token that would complete one: minus infinity           NoBadWordsLogitsProcessor
    min_tokens          tokens that end the answer too early: minus infinity      MinNewTokensLengthLogitsProcessor
    allowed_token_ids   all others: minus infinity                                PrefixConstrainedLogitsProcessor
    grammar             what it does not allow: minus infinity                    PrefixConstrainedLogitsProcessor

Then comes `Ops.sample`, with temperature, top_k, top_p, min_p and typical_p. The four penalties read the counts that
`SlotStates` keeps, and change a row in one pass (`Ops.penalize`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import SampleBatch
from penstock.kernels.ops import Ops
from penstock.sampling.state import BatchState, SlotStates

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


@contextmanager
def processed(ops: Ops, logits: Tensor, batch: SampleBatch, states: SlotStates, state: BatchState) -> Iterator[None]:
    """Process `logits` [num_samples, vocab] float32 in place, and undo it at the end.

    Rows of which no log-probabilities are wanted may stay as they became. What is NaN or plus infinity stays so, unless
    it is masked.

    Args:
        state: what `states` has of the batch's rows.
    """
    masked = {*state.masked, *batch.mask.rows} if batch.mask is not None else state.masked
    copied = [row for row, _ in state.logprobs if row in masked] if masked else []
    rows = logits[copied] if copied else None
    edits = _Edits(logits)
    _bias(edits, batch, state.biased)
    if state.penalized:
        _penalize(ops, edits, batch, states, state)
    _ban(edits, batch, state)
    _mask(ops, logits, batch, state.masked)
    yield
    if state.logprobs:
        edits.undo()
    if rows is not None:
        logits[copied] = rows


def may_rule_out_all(batch: SampleBatch, row: int) -> bool:
    """Whether a row's controls could leave no token."""
    params = batch.sequences[row].params
    ruled_out = params.banned or params.min_tokens or params.allowed_token_ids is not None
    return bool(ruled_out) or (batch.mask is not None and row in batch.mask.rows)


class _Edits:
    """Changes of single logits, and how to undo them."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.to_undo: list[Callable[[], object]] = []

    @property
    def vocab(self) -> int:
        return self.logits.shape[-1]

    @functools.cached_property
    def _flat(self) -> Tensor:
        assert self.logits.is_contiguous()
        return self.logits.view(-1)

    def change(self, places: Integers, operands: Floats, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Put `change(logits, operands)` at these places of the flat tensor, each named once."""
        index, values = (torch.from_numpy(column).to(self._flat.device) for column in (places, operands))
        before = self._flat[index]
        self._flat[index] = change(before, values)
        self.to_undo.append(functools.partial(self._flat.index_put_, (index,), before))

    def undo(self) -> None:
        for put_back in reversed(self.to_undo):
            put_back()


# ── the processors ───────────────────────────────────────────────────────────────────────────────────────────────────


def _bias(edits: _Edits, batch: SampleBatch, rows: list[int]) -> None:
    if rows:
        tables = [_bias_table(batch.sequences[row].params.logit_bias) for row in rows]
        places = np.concatenate([table[0] + row * edits.vocab for row, table in zip(rows, tables, strict=True)])
        edits.change(places, np.concatenate([table[1] for table in tables]), torch.add)


def _penalize(ops: Ops, edits: _Edits, batch: SampleBatch, states: SlotStates, state: BatchState) -> None:
    rows, penalties = state.penalized, state.penalties
    if penalties[:, 3].any():
        penalties = penalties.copy()
        penalties[:, 3] /= [batch.positions[row] for row in rows]
    tables = states.counts(batch, rows)
    put_back = ops.penalize(edits.logits, np.array(rows, np.int64), penalties, tables, undo=bool(state.logprobs))
    if put_back is not None:
        edits.to_undo.append(put_back)
    states.drop_drafts(batch, rows)


def _ban(edits: _Edits, batch: SampleBatch, state: BatchState) -> None:
    places = [_completing(batch, row) + row * edits.vocab for row in state.banned]
    for row, first_end in state.first_ends:
        if batch.positions[row] < first_end:
            places.append(_token_array(batch.sequences[row].params.stop_token_ids) + row * edits.vocab)
    if places:
        banned = np.unique(np.concatenate(places))
        edits.change(banned, np.full(len(banned), -np.inf, np.float32), lambda x, none: none.where(x < torch.inf, x))


def _mask(ops: Ops, logits: Tensor, batch: SampleBatch, rows: list[int]) -> None:
    for row in rows:
        allowed = torch.from_numpy(_token_array(batch.sequences[row].params.allowed_token_ids or ())).to(logits.device)
        spared = logits[row, allowed]
        logits[row] = -torch.inf
        logits[row, allowed] = spared
    if batch.mask is not None:
        ops.apply_bitmask(logits, np.array(batch.mask.rows, np.int64), batch.mask.result())


# ── what they look up ────────────────────────────────────────────────────────────────────────────────────────────────


@functools.lru_cache(maxsize=1024)
def _bias_table(bias: tuple[tuple[int, float], ...]) -> tuple[Integers, Floats]:
    tokens, amounts = zip(*bias, strict=True)
    return np.array(tokens, np.int64), np.array(amounts, np.float32)


@functools.lru_cache(maxsize=1024)
def _token_array(tokens: tuple[int, ...]) -> Integers:
    return np.array(tokens, np.int64)


Run = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _by_last_but_one(banned: tuple[Run, ...]) -> tuple[Integers, dict[int, list[Run]]]:
    """The runs of one token, and the longer ones by the token before their last."""
    longer: dict[int, list[Run]] = {}
    for run in banned:
        if len(run) > 1:
            longer.setdefault(run[-2], []).append(run)
    return np.array([run[0] for run in banned if len(run) == 1], np.int64), longer


def _completing(batch: SampleBatch, row: int) -> Integers:
    """The tokens that would complete a banned run."""
    history, position = batch.sequences[row].tokens, batch.positions[row]
    singles, longer = _by_last_but_one(batch.sequences[row].params.banned)
    ends = [
        run[-1]
        for run in longer.get(history[position - 1], ())
        if tuple(history[max(0, position - len(run) + 1) : position]) == run[:-1]
    ]
    return np.concatenate((singles, np.array(ends, np.int64))) if ends else singles
