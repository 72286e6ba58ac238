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

Then comes `Ops.sample`, with temperature, top_k, top_p, min_p and typical_p. What counts tokens counts them anew in
each step: so nothing is kept that a preempted or resumed sequence would lack.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import SampleBatch
from penstock.kernels.ops import Ops

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


@contextmanager
def processed(ops: Ops, logits: Tensor, batch: SampleBatch) -> Iterator[None]:
    """Process `logits` [num_samples, vocab] float32 in place, and undo it at the end.

    A row of which nobody wants log-probabilities may stay without the tokens that a mask did not allow. What is not a
    number, or plus infinity, stays so, unless it is masked.
    """
    masked = [row for row, params in enumerate(batch.params) if params.allowed_token_ids is not None]
    masked += batch.mask.rows if batch.mask is not None else []
    wanted = sorted({row for row in masked if batch.params[row].logprobs is not None})
    rows = logits[wanted] if wanted else None
    edits = _Edits(logits)
    for processor in (_bias, _penalize_repetition, _penalize_answer, _penalize_shares, _ban):
        processor(edits, batch)
    _mask(ops, logits, batch)
    yield
    edits.undo()
    if rows is not None:
        logits[wanted] = rows


def may_rule_out_all(batch: SampleBatch, row: int) -> bool:
    """Whether a row's controls could leave no token."""
    params = batch.params[row]
    ruled_out = params.banned or params.min_tokens or params.allowed_token_ids is not None
    return bool(ruled_out) or (batch.mask is not None and row in batch.mask.rows)


class _Edits:
    """Changes of single logits, given by their places in the flat tensor, each once."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._before: list[tuple[Tensor, Tensor]] = []

    @property
    def vocab(self) -> int:
        return self._logits.shape[-1]

    @functools.cached_property
    def _flat(self) -> Tensor:
        assert self._logits.is_contiguous()
        return self._logits.view(-1)

    def change(self, places: Integers, operands: Floats, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Put `change(logits, operands)` at these places."""
        index, values = (torch.from_numpy(column).to(self._flat.device) for column in (places, operands))
        before = self._flat[index]
        self._flat[index] = change(before, values)
        self._before.append((index, before))

    def undo(self) -> None:
        for index, before in reversed(self._before):
            self._flat[index] = before


# ── the processors ───────────────────────────────────────────────────────────────────────────────────────────────────


def _bias(edits: _Edits, batch: SampleBatch) -> None:
    rows = [row for row, params in enumerate(batch.params) if params.logit_bias]
    if rows:
        tables = [_bias_table(batch.params[row].logit_bias) for row in rows]
        places = np.concatenate([table[0] + row * edits.vocab for row, table in zip(rows, tables, strict=True)])
        edits.change(places, np.concatenate([table[1] for table in tables]), torch.add)


def _penalize_repetition(edits: _Edits, batch: SampleBatch) -> None:
    rows = [row for row, params in enumerate(batch.params) if params.repetition_penalty != 1]
    if rows:
        owners, places, _ = _count([_history(batch, row) for row in rows], rows, edits.vocab)
        penalties = np.array([batch.params[row].repetition_penalty for row in rows], np.float32)
        edits.change(places, penalties[owners], lambda x, penalty: torch.where(x < 0, x * penalty, x / penalty))


def _penalize_answer(edits: _Edits, batch: SampleBatch) -> None:
    rows = [row for row, p in enumerate(batch.params) if p.frequency_penalty or p.presence_penalty]
    if rows:
        answers = [_history(batch, row)[batch.prompt_lens[row] :] for row in rows]
        owners, places, counts = _count(answers, rows, edits.vocab)
        frequency, presence = np.array(
            [(batch.params[row].frequency_penalty, batch.params[row].presence_penalty) for row in rows]
        ).T
        edits.change(places, (frequency[owners] * counts + presence[owners]).astype(np.float32), torch.sub)


def _penalize_shares(edits: _Edits, batch: SampleBatch) -> None:
    rows = [row for row, params in enumerate(batch.params) if params.share_penalty]
    if rows:
        owners, places, counts = _count([_history(batch, row) for row in rows], rows, edits.vocab)
        each = np.array([batch.params[row].share_penalty / batch.positions[row] for row in rows])
        edits.change(places, (each[owners] * counts).astype(np.float32), torch.sub)


def _ban(edits: _Edits, batch: SampleBatch) -> None:
    places: list[Integers] = []
    for row, params in enumerate(batch.params):
        if params.banned:
            places.append(_completing(params.banned, batch, row) + row * edits.vocab)
        if batch.positions[row] - batch.prompt_lens[row] < params.min_tokens:
            places.append(np.array(params.stop_token_ids, np.int64) + row * edits.vocab)
    if places:
        banned = np.unique(np.concatenate(places))
        edits.change(banned, np.full(len(banned), -np.inf, np.float32), lambda x, none: none.where(x < torch.inf, x))


def _mask(ops: Ops, logits: Tensor, batch: SampleBatch) -> None:
    for row, params in enumerate(batch.params):
        if params.allowed_token_ids is not None:
            allowed = torch.from_numpy(_token_array(params.allowed_token_ids)).to(logits.device)
            spared = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = spared
    if batch.mask is not None:
        ops.apply_bitmask(logits, np.array(batch.mask.rows, np.int64), batch.mask.result())


# ── what they look at ────────────────────────────────────────────────────────────────────────────────────────────────


def _history(batch: SampleBatch, row: int) -> NDArray[np.int32]:
    """The tokens before the one to be sampled."""
    return np.frombuffer(batch.histories[row][: batch.positions[row]], np.int32)


def _count(texts: Sequence[NDArray[np.int32]], rows: Sequence[int], vocab: int) -> tuple[Integers, Integers, Integers]:
    """The different tokens of each row's text: whose (a place in `rows`), their places in the logits, how often."""
    lengths = [len(text) for text in texts]
    firsts = np.arange(len(rows), dtype=np.int64) * vocab
    found, counts = np.unique(np.concatenate(texts, dtype=np.int64) + np.repeat(firsts, lengths), return_counts=True)
    owners: Integers = found // vocab
    places: Integers = found + (np.array(rows, np.int64) * vocab - firsts)[owners]
    return owners, places, counts.astype(np.int64)


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


def _completing(banned: tuple[Run, ...], batch: SampleBatch, row: int) -> Integers:
    """The tokens that would complete a banned run."""
    singles, longer = _by_last_but_one(banned)
    history, position = batch.histories[row], batch.positions[row]
    ends = [
        run[-1]
        for run in longer.get(history[position - 1], ())
        if tuple(history[max(0, position - len(run) + 1) : position]) == run[:-1]
    ]
    return np.concatenate((singles, np.array(ends, np.int64))) if ends else singles
