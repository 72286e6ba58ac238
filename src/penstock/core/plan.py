"""The contract between scheduler and runner: plain data, no torch.

A `StepPlan` is one forward pass over a ragged batch, as columns: entry `i` of each column speaks of the plan's i-th
sequence. Its `token_ids` are those of all sequences, one after another:

    query_lens      3         1    4
    token_ids       a b c     d    e f g h
    starts          32        71   0            (how many tokens of the sequence are in the KV cache already)

The runner computes keys and values of these tokens at positions `start .. start + query_len - 1`, and samples where
`samples` says so. The columns may share memory with the scheduler: they are valid until `execute` returns.
"""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from penstock.request import ResolvedParams, TokenLogprob


@dataclass(slots=True)
class SampleBatch:
    """Which rows to sample from, as columns. A row appears `n` times where one prompt starts `n` sequences."""

    rows: list[int] = field(default_factory=list)
    """Index of the planned sequence; the logits are those of its last token in this step."""
    params: list[ResolvedParams] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """The sequence's index in its request: with `params.seed` and the position, the key of its random numbers."""
    positions: list[int] = field(default_factory=list)
    """The position that the new token will have in its sequence, prompt included."""
    num_generated: list[int] = field(default_factory=list)
    """Tokens generated before this one: below `params.min_tokens`, stop tokens must not be sampled."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class StepPlan:
    """One forward pass; see the module's docstring."""

    query_lens: list[int]
    starts: list[int]
    token_ids: "array[int]"
    """int32, `sum(query_lens)` of them."""
    block_tables: "list[array[int]]"
    """int32 block ids of each sequence in order; they cover at least `start + query_len` tokens."""
    block_copies: list[tuple[int, int]]
    """(from, to): blocks to copy, in all layers, before anything is computed or written."""
    samples: SampleBatch


@dataclass(slots=True)
class StepResult:
    """What a step sampled, in the order of `StepPlan.samples`."""

    token_ids: list[int]
    """A sampled id, or -1 where the logits were not finite: that sequence ends with `error`."""
    logprobs: list[TokenLogprob | None] | None = None
    """None if nobody asked; else an entry a sample, None where that one did not ask."""


class Runner(Protocol):
    """Anything that turns a plan into a result: torch, a fake in tests, a simulator's clock."""

    def execute(self, plan: StepPlan) -> StepResult: ...
