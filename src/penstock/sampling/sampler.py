"""Logits in, tokens out: one call a step, whatever each row asks for.

    processors     bias, penalties, bans and masks change single logits, and are undone at the end
    Ops.sample     temperature, top_k, top_p, min_p, typical_p, and a draw
    logprobs       of the logits as they came

A control costs nothing to the rows that do without it.
"""

import torch
from torch import Tensor

from penstock.core.plan import Ending, SampleBatch, StepResult
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import Controls
from penstock.request import TokenLogprob
from penstock.sampling.logprobs import token_logprobs
from penstock.sampling.processors import may_rule_out_all, processed
from penstock.sampling.random import uniforms
from penstock.sampling.state import BatchState, SlotStates


class Sampler:
    """Chooses tokens, and keeps the state of the sequence in each slot."""

    def __init__(self, ops: Ops, num_slots: int) -> None:
        """`ops` are those of the logits' device."""
        self._ops = ops
        self._states = SlotStates(num_slots)

    def sample(self, logits: Tensor, batch: SampleBatch) -> StepResult:
        """Choose a token for each row.

        Args:
            logits: [num_samples, vocab] float32, contiguous. Rows of which no log-probabilities are wanted may be
                others after the call.
            batch: the rows' sequences, with the keys of their random numbers.

        Returns:
            A token a row. None, and an ending, where a logit is NaN or +inf, or all are -inf (NOT_FINITE), or where all
            are -inf under the row's controls (NO_TOKEN_LEFT). Log-probabilities are those of the logits as given,
            before any control; None for rows that did not ask or failed.
        """
        state = self._states.assign(batch)
        with processed(self._ops, logits, batch, self._states, state):
            tokens: list[int] = _choose(self._ops, logits, batch, state).tolist()
            result = StepResult([*tokens])
            for row, token in enumerate(tokens):
                if token < 0:
                    none_left = may_rule_out_all(batch, row) and bool((logits[row] == -torch.inf).all())
                    result.end(row, Ending.NO_TOKEN_LEFT if none_left else Ending.NOT_FINITE)
        if state.logprobs:
            result.logprobs = _logprobs(self._ops, logits, tokens, state.logprobs)
        return result


def _choose(ops: Ops, logits: Tensor, batch: SampleBatch, state: BatchState) -> Tensor:
    """[num_samples] int64; -1 where there is nothing to choose."""
    if state.is_greedy:
        return ops.argmax(logits)
    uniform = uniforms(state.seeds, batch.indices, batch.positions)
    temperature, top_k, top_p, min_p, typical_p = state.controls.T
    return ops.sample(logits, Controls(temperature, top_k, top_p, min_p, typical_p, uniform))


def _logprobs(ops: Ops, logits: Tensor, tokens: list[int], asked: list[tuple[int, int]]) -> list[TokenLogprob | None]:
    """Of the rows that ask for some, and got a token."""
    logprobs: list[TokenLogprob | None] = [None] * len(tokens)
    asking = [(row, count) for row, count in asked if tokens[row] >= 0]
    if asking:
        rows = [row for row, _ in asking]
        some = logits if len(rows) == len(tokens) else logits[rows]
        entries = token_logprobs(ops, some, [tokens[row] for row in rows], [count for _, count in asking])
        for row, entry in zip(rows, entries, strict=True):
            logprobs[row] = entry
    return logprobs
