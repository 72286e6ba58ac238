"""What sampling keeps of the sequence in each slot, from step to step.

    controls   columns [num_slots, ...], of which a step takes its rows
    counts     of a history's tokens, where a penalty needs them; a new token is added, nothing is counted again

All of it follows from a `SampledSequence`, and is built anew when a slot gets another one. Drafts are counted for the
rows behind them and taken back in the same step, so between steps a wrong guess leaves nothing.
"""

import itertools
from array import array
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from penstock.core.plan import SampleBatch, SampledSequence
from penstock.kernels.penalize import CountTable

Integers = NDArray[np.int64]


class TokenCounts:
    """How often each token is in a history's first `num_counted` tokens, and in those of the answer."""

    __slots__ = ("num_counted", "table")

    def __init__(self, history: "array[int]", prompt_len: int) -> None:
        tokens, totals = np.unique(np.frombuffer(history, np.int32), return_counts=True)
        in_answer, counts = np.unique(np.frombuffer(history[prompt_len:], np.int32), return_counts=True)
        answers = np.zeros(len(tokens), np.int32)
        answers[tokens.searchsorted(in_answer)] = counts
        columns = (tokens, totals.astype(np.int32), answers)
        self.table = CountTable(*(array("i", column.tobytes()) for column in columns))
        self.num_counted = len(history)

    def add(self, token: int) -> None:
        """The answer goes on with this token."""
        tokens, totals, answers = self.table
        place = bisect_left(tokens, token)
        if place == len(tokens) or tokens[place] != token:
            tokens.insert(place, token)
            totals.insert(place, 0)
            answers.insert(place, 0)
        totals[place] += 1
        answers[place] += 1
        self.num_counted += 1

    def remove(self, token: int) -> None:
        """The answer's last token was this one, and is no more."""
        tokens, totals, answers = self.table
        place = bisect_left(tokens, token)
        totals[place] -= 1
        answers[place] -= 1
        self.num_counted -= 1

    def extend(self, history: "array[int]", end: int) -> None:
        """Count a history up to `end`; what is counted already has not changed."""
        assert self.num_counted <= end, "a history became shorter"
        for position in range(self.num_counted, end):
            self.add(history[position])

    def snapshot(self) -> CountTable:
        """The table as it is now, for good."""
        return CountTable(*(column[:] for column in self.table))


class SlotStates:
    """The state of each slot."""

    def __init__(self, num_slots: int) -> None:
        self.controls = np.zeros((num_slots, 5))
        """temperature, top_k, top_p, min_p, typical_p"""
        self.seeds = np.zeros(num_slots, np.uint64)
        self.penalties = np.zeros((num_slots, 4))
        """repetition, frequency, presence, share"""
        self.num_logprobs = np.full(num_slots, -1, np.int64)
        """-1: none are asked for."""
        self.first_ends = np.zeros(num_slots, np.int64)
        """The position from which on a token may end the answer."""
        self.biased, self.penalized, self.banned, self.masked = (np.zeros(num_slots, bool) for _ in range(4))
        self._owners: list[SampledSequence | None] = [None] * num_slots
        self._counts: list[TokenCounts | None] = [None] * num_slots

    def assign(self, batch: SampleBatch) -> Integers:
        """The slot of each row, with the state of its sequence."""
        owners = self._owners
        for sequence in batch.sequences:
            if owners[sequence.slot] is not sequence:
                self._take_in(sequence)
        return np.array([sequence.slot for sequence in batch.sequences], np.int64)

    def _take_in(self, sequence: SampledSequence) -> None:
        slot, params = sequence.slot, sequence.params
        self._owners[slot] = sequence
        self._counts[slot] = None
        temperature = max(params.temperature, COLDEST) if params.temperature else 0.0
        self.controls[slot] = temperature, params.top_k, params.top_p, params.min_p, params.typical_p
        self.seeds[slot] = params.seed
        self.penalties[slot] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            params.share_penalty,
        )
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.first_ends[slot] = sequence.prompt_len + params.min_tokens
        self.biased[slot] = bool(params.logit_bias)
        self.penalized[slot] = (self.penalties[slot] != NO_PENALTY).any()
        self.banned[slot] = bool(params.banned)
        self.masked[slot] = params.allowed_token_ids is not None

    def counts(self, batch: SampleBatch, rows: list[int]) -> list[CountTable]:
        """The counts of each row's history; `rows` hold all that the batch has of their sequences.

        To be read before the next call of `drop_drafts`.
        """
        tables: list[CountTable] = []
        for row, following in itertools.zip_longest(rows, rows[1:]):
            sequence = batch.sequences[row]
            counts = self._counted(sequence, batch.positions[row])
            is_last = following is None or batch.sequences[following] is not sequence
            tables.append(counts.table if is_last else counts.snapshot())
        return tables

    def _counted(self, sequence: SampledSequence, position: int) -> TokenCounts:
        counts = self._counts[sequence.slot]
        if counts is None:
            counts = self._counts[sequence.slot] = TokenCounts(sequence.tokens[:position], sequence.prompt_len)
        else:
            counts.extend(sequence.tokens, position)
        return counts

    def drop_drafts(self, batch: SampleBatch, rows: list[int]) -> None:
        """Take back what was counted behind each sequence's first row."""
        for row in reversed(rows):
            counts = self._counts[batch.sequences[row].slot]
            assert counts is not None
            while counts.num_counted > batch.positions[row]:
                counts.remove(batch.sequences[row].tokens[counts.num_counted - 1])


COLDEST = 1e-30
"""Lower temperatures would be a float32's zero; from far above on, only tokens as likely as the likeliest remain."""
NO_PENALTY = (1.0, 0.0, 0.0, 0.0)
