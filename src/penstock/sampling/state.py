"""Sampling state of the sequence in each slot, kept from step to step.

    controls   columns [num_slots, ...]; a step takes its rows
    counts     token counts of a history, if a penalty needs them; new tokens are added, nothing is counted again

All of it follows from a `SampledSequence`, and is built anew when a slot gets another one. Drafts are counted for the
rows behind them and taken back in the same step, so between steps a wrong guess leaves nothing.
"""

import itertools
from array import array
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.plan import SampleBatch, SampledSequence
from penstock.kernels.sampling import CountTable


class TokenCounts:
    """Occurrences of each token in the first `num_counted` tokens of a history, and in those of its answer."""

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
        """Count one more token of the answer."""
        tokens, totals, answers = self.table
        index = bisect_left(tokens, token)
        if index == len(tokens) or tokens[index] != token:
            tokens.insert(index, token)
            totals.insert(index, 0)
            answers.insert(index, 0)
        totals[index] += 1
        answers[index] += 1
        self.num_counted += 1

    def remove(self, token: int) -> None:
        """Uncount `token`, the last one of the answer."""
        tokens, totals, answers = self.table
        index = bisect_left(tokens, token)
        totals[index] -= 1
        answers[index] -= 1
        self.num_counted -= 1

    def extend(self, history: "array[int]", end: int) -> None:
        """Count a history up to `end`; its counted part must not have changed."""
        assert self.num_counted <= end, "a history became shorter"
        for position in range(self.num_counted, end):
            self.add(history[position])

    def snapshot(self) -> CountTable:
        """A copy of the current table."""
        return CountTable(*(column[:] for column in self.table))


class BatchState(NamedTuple):
    """The controls of a batch's rows, gathered from their slots. Lists hold the rows that have a control."""

    controls: NDArray[np.float64]
    """[num_rows, 5]: temperature, top_k, top_p, min_p, typical_p"""
    is_greedy: bool
    seeds: NDArray[np.uint64]
    biased: list[int]
    penalized: list[int]
    penalties: NDArray[np.float64]
    """[len(penalized), 4]: repetition, frequency, presence, share"""
    banned: list[int]
    first_ends: list[tuple[int, int]]
    """(row, first position at which a token may end the answer) of the rows with min_tokens."""
    masked: list[int]
    transcripts: list[int]
    logprobs: list[tuple[int, int]]
    """(row, number of top alternatives) of the rows that return log-probabilities."""

    @property
    def changes_logits(self) -> bool:
        """Whether a control of a row changes single logits."""
        return bool(self.biased or self.penalized or self.banned or self.first_ends or self.masked or self.transcripts)


class SlotStates:
    """The sampling state of each slot."""

    def __init__(self, num_slots: int) -> None:
        self._controls = np.zeros((num_slots, 5))
        self._seeds = np.zeros(num_slots, np.uint64)
        self._penalties = np.zeros((num_slots, 4))
        self._num_logprobs = np.full(num_slots, -1, np.int64)  # -1: none are asked for
        self._first_ends = np.zeros(num_slots, np.int64)  # 0: at any position
        self._biased, self._penalized, self._banned = (np.zeros(num_slots, bool) for _ in range(3))
        self._masked, self._transcripts = (np.zeros(num_slots, bool) for _ in range(2))
        self._owners: list[SampledSequence | None] = [None] * num_slots
        self._counts: list[TokenCounts | None] = [None] * num_slots
        self._latest: tuple[list[SampledSequence], BatchState] | None = None

    def assign(self, batch: SampleBatch) -> BatchState:
        """Assign the slots to the batch's sequences; returns the controls of its rows.

        Most steps sample the same sequences as the one before, and nothing is gathered anew.
        """
        if self._latest is None or self._latest[0] != batch.sequences:
            for sequence in batch.sequences:
                # By identity: the scheduler makes a new one whenever a slot is assigned.
                if self._owners[sequence.slot] is not sequence:
                    self._take_in(sequence)
            self._latest = (batch.sequences[:], self._gather(batch))
        return self._latest[1]

    def _gather(self, batch: SampleBatch) -> BatchState:
        slots = np.array([sequence.slot for sequence in batch.sequences], np.int64)
        controls, penalized = self._controls[slots], _rows(self._penalized[slots])
        first_ends, num_logprobs = self._first_ends[slots], self._num_logprobs[slots]
        return BatchState(
            controls=controls,
            is_greedy=not controls[:, 0].any(),
            seeds=self._seeds[slots],
            biased=_rows(self._biased[slots]),
            penalized=penalized,
            penalties=self._penalties[slots[penalized]],
            banned=_rows(self._banned[slots]),
            first_ends=[(row, int(first_ends[row])) for row in _rows(first_ends > 0)],
            masked=_rows(self._masked[slots]),
            transcripts=_rows(self._transcripts[slots]),
            logprobs=[(row, int(num_logprobs[row])) for row in _rows(num_logprobs >= 0)],
        )

    def _take_in(self, sequence: SampledSequence) -> None:
        slot, params = sequence.slot, sequence.params
        self._owners[slot] = sequence
        # Counted when a penalty first asks for it: most sequences have none.
        self._counts[slot] = None
        temperature = max(params.temperature, COLDEST) if params.temperature else 0.0
        self._controls[slot] = temperature, params.top_k, params.top_p, params.min_p, params.typical_p
        self._seeds[slot] = params.seed
        self._penalties[slot] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            params.share_penalty,
        )
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._first_ends[slot] = sequence.prompt_len + params.min_tokens if params.min_tokens else 0
        self._biased[slot] = bool(params.logit_bias)
        self._penalized[slot] = (self._penalties[slot] != NO_PENALTY).any()
        self._banned[slot] = bool(params.banned)
        self._masked[slot] = params.allowed_token_ids is not None
        self._transcripts[slot] = params.transcript is not None

    def counts(self, batch: SampleBatch, rows: list[int]) -> list[CountTable]:
        """The token counts of each row's history; `rows` must include all rows of their sequences.

        To be read before the next call of `drop_drafts`.
        """
        tables: list[CountTable] = []
        for row, following in itertools.zip_longest(rows, rows[1:]):
            sequence = batch.sequences[row]
            counts = self._counted(sequence, batch.positions[row])
            is_last = following is None or batch.sequences[following] is not sequence
            # The rows of drafts share one table, which the next row changes: all but the last get a copy.
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
        """Uncount the drafts behind each sequence's first row."""
        for row in reversed(rows):
            counts = self._counts[batch.sequences[row].slot]
            assert counts is not None
            while counts.num_counted > batch.positions[row]:
                counts.remove(batch.sequences[row].tokens[counts.num_counted - 1])


def _rows(flags: NDArray[np.bool_]) -> list[int]:
    rows: list[int] = np.flatnonzero(flags).tolist()
    return rows


COLDEST = 1e-30
"""Minimum temperature: a lower one could be 0 in float32, and far higher ones leave only the most likely tokens."""
NO_PENALTY = (1.0, 0.0, 0.0, 0.0)
