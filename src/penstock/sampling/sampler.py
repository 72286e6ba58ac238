"""Samples a step's tokens from its logits, in one call for rows with any controls.

    processed        bias, penalties, bans and masks change single logits, and are undone at the end
    Ops.sample       temperature, top_k, top_p, min_p, typical_p, and a draw
    token_logprobs   log-probabilities of the unmodified logits

A control costs nothing to the rows that do without it. The order within `processed` is that of `transformers`'
`generate` (beside each the processor that it has there):

    logit_bias          added                                                     SequenceBiasLogitsProcessor
    repetition_penalty  divides logits above 0, multiplies others,                RepetitionPenaltyLogitsProcessor
                        of tokens in prompt or answer
    frequency_penalty   subtracted for each occurrence of a token in the answer   OpenAI's
    presence_penalty    subtracted once, for tokens in the answer                 OpenAI's
    share_penalty       subtracted, times the token's share of prompt and answer  TGI's frequency_penalty
    bad words, tokens   a token that would complete one: minus infinity           NoBadWordsLogitsProcessor
    min_tokens          tokens that end the answer too early: minus infinity      MinNewTokensLengthLogitsProcessor
    allowed_token_ids   all others: minus infinity                                PrefixConstrainedLogitsProcessor
    grammar             what it does not allow: minus infinity                    PrefixConstrainedLogitsProcessor
    transcript          what its rules forbid: minus infinity                     WhisperTimeStampLogitsProcessor

The four penalties read the counts that `SlotStates` keeps, and change a row in one pass (`Ops.penalize`).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from penstock.api.request import TokenLogprob
from penstock.core.plan import Ending, SampleBatch, StepResult
from penstock.kernels.array_types import A
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import SCALE, Controls
from penstock.sampling.random import uniforms
from penstock.sampling.state import BatchState, SlotStates
from penstock.sampling.transcripts import forbidden

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


@contextmanager
def processed(ops: Ops[A], logits: A, batch: SampleBatch, states: SlotStates, state: BatchState) -> Iterator[None]:
    """Process `logits` [num_samples, vocab] float32 in place, and undo it at the end.

    Rows without log-probabilities may stay changed. NaN and plus infinity stay so, unless they are masked.

    Args:
        state: the state of the batch's rows in `states`.
    """
    masked = {*state.masked, *batch.mask.rows} if batch.mask is not None else state.masked
    copied = [row for row, _ in state.logprobs if row in masked] if masked else []
    row_ids = ops.from_host(np.array(copied, np.int64), logits)
    rows = ops.gather(logits, row_ids) if copied else None
    edits = _Edits(ops, logits)
    # In the order of the module's table: penalties and bans see what those before them made of the logits.
    _bias(edits, batch, state.biased)
    if state.penalized:
        _penalize(ops, edits, batch, states, state)
    _ban(edits, batch, state)
    _mask(ops, logits, batch, state.masked)
    _follow_rules(ops, edits, batch, state.transcripts)
    yield
    if state.logprobs:
        edits.undo()
    if rows is not None:
        ops.scatter(rows, row_ids, logits)


def may_rule_out_all(batch: SampleBatch, row: int) -> bool:
    """Whether a row's controls could leave no token."""
    params = batch.sequences[row].params
    ruled_out = params.banned or params.min_tokens or params.allowed_token_ids is not None or params.transcript
    return bool(ruled_out) or (batch.mask is not None and row in batch.mask.rows)


class _Edits(Generic[A]):
    """Reversible changes of single logits."""

    def __init__(self, ops: Ops[A], logits: A) -> None:
        self.logits, self._ops = logits, ops
        self.to_undo: list[Callable[[], object]] = []

    @property
    def vocab(self) -> int:
        vocab: int = self.logits.shape[-1]
        return vocab

    def change(self, indices: Integers, change: Callable[[Floats], Floats]) -> None:
        """Replace the logits at these distinct indices of the flat tensor by `change(logits)`."""
        before = self._ops.take(self.logits, indices)
        self._ops.put(self.logits, indices, change(before))
        self.to_undo.append(functools.partial(self._ops.put, self.logits, indices, before))

    def undo(self) -> None:
        # Last first: two controls may have changed the same logit.
        for put_back in reversed(self.to_undo):
            put_back()


# ── the processors ───────────────────────────────────────────────────────────────────────────────────────────────────


def _bias(edits: _Edits, batch: SampleBatch, rows: list[int]) -> None:
    if rows:
        tables = [_bias_table(batch.sequences[row].params.logit_bias) for row in rows]
        indices = np.concatenate([table[0] + row * edits.vocab for row, table in zip(rows, tables, strict=True)])
        amounts = np.concatenate([table[1] for table in tables])
        edits.change(indices, lambda before: before + amounts)


def _penalize(ops: Ops[A], edits: _Edits[A], batch: SampleBatch, states: SlotStates, state: BatchState) -> None:
    rows, penalties = state.penalized, state.penalties
    if penalties[:, 3].any():
        # The rows are cached from step to step; the position is this step's.
        penalties = penalties.copy()
        penalties[:, 3] /= [batch.positions[row] for row in rows]
    tables = states.counts(batch, rows)
    put_back = ops.penalize(edits.logits, np.array(rows, np.int64), penalties, tables, undo=bool(state.logprobs))
    if put_back is not None:
        edits.to_undo.append(put_back)
    states.drop_drafts(batch, rows)


def _ban(edits: _Edits, batch: SampleBatch, state: BatchState) -> None:
    indices = [_completing(batch, row) + row * edits.vocab for row in state.banned]
    for row, first_end in state.first_ends:
        if batch.positions[row] < first_end:
            indices.append(_token_array(batch.sequences[row].params.stop_token_ids) + row * edits.vocab)
    if indices:
        no_chance = np.float32(-np.inf)
        edits.change(np.unique(np.concatenate(indices)), lambda before: np.where(before < np.inf, no_chance, before))


def _mask(ops: Ops[A], logits: A, batch: SampleBatch, rows: list[int]) -> None:
    if rows:
        bits = [_bits(batch.sequences[row].params.allowed_token_ids or (), logits.shape[-1]) for row in rows]
        ops.apply_bitmask(logits, np.array(rows, np.int64), np.stack(bits))
    if batch.mask is not None:
        ops.apply_bitmask(logits, np.array(batch.mask.rows, np.int64), batch.mask.result())


def _follow_rules(ops: Ops[A], edits: _Edits[A], batch: SampleBatch, rows: list[int]) -> None:
    for row in rows:
        sequence, first = batch.sequences[row], row * edits.vocab
        rules = sequence.params.transcript
        assert rules is not None
        answer = sequence.tokens[sequence.prompt_len : batch.positions[row]]
        if answer and not rules.has_timestamps:
            continue
        logits = ops.take(edits.logits, np.arange(first, first + edits.vocab))
        banned = forbidden(logits, answer, rules) & (logits < np.inf)  # NaN stays
        edits.change(np.flatnonzero(banned) + first, lambda before: np.full_like(before, -np.inf))


# ── what they look up ────────────────────────────────────────────────────────────────────────────────────────────────


@functools.lru_cache(maxsize=1024)
def _bias_table(bias: tuple[tuple[int, float], ...]) -> tuple[Integers, Floats]:
    tokens, amounts = zip(*bias, strict=True)
    return np.array(tokens, np.int64), np.array(amounts, np.float32)


@functools.lru_cache(maxsize=1024)
def _token_array(tokens: tuple[int, ...]) -> Integers:
    return np.array(tokens, np.int64)


def _bits(tokens: tuple[int, ...], vocab: int) -> NDArray[np.int32]:
    """[vocab / 32 rounded up]: the bit of each of these tokens is 1; see `Ops.apply_bitmask`."""
    allowed = np.zeros(-(-vocab // 32) * 32, np.bool_)
    allowed[_token_array(tokens)] = True
    return np.packbits(allowed, bitorder="little").view("<i4")


Run = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _by_last_but_one(banned: tuple[Run, ...]) -> tuple[Integers, dict[int, list[Run]]]:
    """The banned runs of one token, and the longer ones by their last token but one."""
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


def token_logprobs(ops: Ops[A], logits: A, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities of one token per row and of the row's most likely tokens; NaN if logits are not finite.

    Args:
        logits: [num_rows, vocab] float32.
        token_ids: one per row.
        counts: number of top alternatives for each row.
    """
    num_rows, vocab = logits.shape
    largest = ops.topk_logprobs(logits, min(max(counts), vocab))
    chosen = ops.take(logits, np.arange(num_rows) * vocab + np.array(token_ids, np.int64))
    with np.errstate(all="ignore"):  # rows that are not finite
        norm = np.where(np.isfinite(largest.top), largest.top + np.log(largest.total / SCALE), np.nan)  # float64
        chosen_logprobs, best = (chosen - norm).tolist(), (largest.logits - norm[:, None]).tolist()
    tokens = largest.token_ids.tolist()
    return [
        TokenLogprob(token, chosen_logprobs[row], tuple(zip(tokens[row][:count], best[row][:count], strict=True)))
        for row, (token, count) in enumerate(zip(token_ids, counts, strict=True))
    ]


class Sampler(Generic[A]):
    """Samples tokens, and keeps the sampling state of each slot."""

    def __init__(self, ops: Ops[A], num_slots: int) -> None:
        """`ops`: operations on the logits' device."""
        self._ops = ops
        self._states = SlotStates(num_slots)

    def sample(self, logits: A, batch: SampleBatch) -> StepResult:
        """Choose a token for each row.

        Args:
            logits: [num_samples, vocab] float32, contiguous. Rows without log-probabilities may be
                changed by the call.
            batch: the rows' sequences, with the keys of their random numbers.

        Returns:
            A token a row. None, and an ending, where a logit is NaN or +inf, or all are -inf (NOT_FINITE), or where all
            are -inf under the row's controls (NO_TOKEN_LEFT). Log-probabilities are those of the logits as given,
            before any control; None for rows that did not ask or failed.
        """
        state = self._states.assign(batch)
        is_changed = batch.mask is not None or state.changes_logits
        with processed(self._ops, logits, batch, self._states, state) if is_changed else nullcontext():
            tokens: list[int] = _choose(self._ops, logits, batch, state).tolist()
            result = StepResult([*tokens])
            for row, token in enumerate(tokens):
                # Rare, so only then is it asked why: that reads a whole row of logits.
                if token < 0:
                    none_left = may_rule_out_all(batch, row) and self._is_ruled_out(logits, row)
                    result.end(row, Ending.NO_TOKEN_LEFT if none_left else Ending.NOT_FINITE)
        if state.logprobs:
            result.logprobs = _logprobs(self._ops, logits, tokens, state.logprobs)
        return result

    def _is_ruled_out(self, logits: A, row: int) -> bool:
        """Whether all logits of a row are -inf."""
        vocab = logits.shape[-1]
        return bool((self._ops.take(logits, np.arange(row * vocab, (row + 1) * vocab)) == -np.inf).all())


def _choose(ops: Ops[A], logits: A, batch: SampleBatch, state: BatchState) -> Integers:
    """The chosen tokens [num_samples]; -1 if no token can be chosen."""
    if state.is_greedy:
        return ops.argmax(logits)
    uniform = uniforms(state.seeds, batch.indices, batch.positions)
    temperature, top_k, top_p, min_p, typical_p = state.controls.T
    return ops.sample(logits, Controls(temperature, top_k, top_p, min_p, typical_p, uniform))


def _logprobs(ops: Ops[A], logits: A, tokens: list[int], asked: list[tuple[int, int]]) -> list[TokenLogprob | None]:
    """Log-probabilities per row; None for rows that did not request them or got no token."""
    logprobs: list[TokenLogprob | None] = [None] * len(tokens)
    asking = [(row, count) for row, count in asked if tokens[row] >= 0]
    if asking:
        rows = [row for row, _ in asking]
        some = logits if len(rows) == len(tokens) else ops.gather(logits, ops.from_host(np.array(rows), logits))
        entries = token_logprobs(ops, some, [tokens[row] for row in rows], [count for _, count in asking])
        for row, entry in zip(rows, entries, strict=True):
            logprobs[row] = entry
    return logprobs
