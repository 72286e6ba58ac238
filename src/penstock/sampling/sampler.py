"""Logits in, tokens out: one call a step, whatever each row asks for.

    processors     bias, penalties, bans and masks change single logits, and are undone at the end
    kernels.draw   temperature, top_k, top_p, min_p, typical_p, and a draw
    logprobs       of the logits as they came

A control costs nothing to the rows that do without it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import Ending, SampleBatch, StepResult
from penstock.kernels.argmax import argmax
from penstock.kernels.draw import Controls, draw
from penstock.request import TokenLogprob
from penstock.sampling.logprobs import token_logprobs
from penstock.sampling.processors import may_rule_out_all, processed
from penstock.sampling.random import uniforms
from penstock.sampling.state import SlotStates


class Sampler:
    """Chooses tokens, and keeps the state of the sequence in each slot."""

    def __init__(self, num_slots: int) -> None:
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
        slots = self._states.assign(batch)
        with processed(logits, batch, self._states, slots):
            tokens: list[int] = self._choose(logits, batch, slots).tolist()
            result = StepResult(list(tokens))
            for row, token in enumerate(tokens):
                if token < 0:
                    none_left = may_rule_out_all(batch, row) and bool((logits[row] == -torch.inf).all())
                    result.end(row, Ending.NO_TOKEN_LEFT if none_left else Ending.NOT_FINITE)
        result.logprobs = self._logprobs(logits, tokens, slots)
        return result

    def _choose(self, logits: Tensor, batch: SampleBatch, slots: NDArray[np.int64]) -> Tensor:
        """[num_samples] int64; -1 where there is nothing to choose."""
        controls = self._states.controls[slots]
        if not controls[:, 0].any():
            return argmax(logits)
        temperature, top_k, top_p, min_p, typical_p = controls.T
        uniform = uniforms(self._states.seeds[slots], batch.indices, batch.positions)
        return draw(logits, Controls(temperature, top_k, top_p, min_p, typical_p, uniform))

    def _logprobs(
        self, logits: Tensor, tokens: list[int], slots: NDArray[np.int64]
    ) -> list[TokenLogprob | None] | None:
        counts = self._states.num_logprobs[slots]
        if counts.max() < 0:
            return None
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        rows: list[int] = np.flatnonzero((counts >= 0) & (np.array(tokens) >= 0)).tolist()
        if rows:
            some = logits if len(rows) == len(tokens) else logits[rows]
            entries = token_logprobs(some, [tokens[row] for row in rows], counts[rows].tolist())
            for row, entry in zip(rows, entries, strict=True):
                logprobs[row] = entry
        return logprobs
