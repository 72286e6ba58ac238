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
from typing import TYPE_CHECKING, Protocol

from penstock.request import TokenLogprob
from penstock.sampling_params import ResolvedParams

if TYPE_CHECKING:  # the core runs without numpy
    import numpy as np
    from numpy.typing import NDArray

NOT_FINITE = -1
NO_TOKEN_LEFT = -2
GRAMMAR_FAILED = -3
COMPLETE = -4


class PendingMask(Protocol):
    """Which tokens a grammar allows, being computed while the forward pass runs."""

    rows: list[int]
    """The samples that are masked, ascending; all others may take any token."""

    def result(self) -> "NDArray[np.int32]":
        """[len(rows), vocab / 32 rounded up]: a bit a token, the lowest first, set where it is allowed. May wait."""
        ...


@dataclass(slots=True)
class SampleBatch:
    """What to sample, as columns. A row appears `n` times where one prompt starts `n` sequences."""

    rows: list[int] = field(default_factory=list)
    """Place in `StepPlan.token_ids` of the token whose logits are sampled."""
    params: list[ResolvedParams] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """The sequence's index in its request: with `params.seed` and the position, the key of its random numbers."""
    positions: list[int] = field(default_factory=list)
    """The position that the new token will have in its sequence, prompt included."""
    histories: "list[array[int]]" = field(default_factory=list)
    """The sequence's tokens; those before the new one are the first `positions[i]`. To be read, in this step only."""
    prompt_lens: list[int] = field(default_factory=list)
    """How many of the history are the prompt."""
    sequence_ids: list[int] = field(default_factory=list)
    """A number of the sequence that no other ever has: for state that is kept from step to step."""
    mask: PendingMask | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class ScoreBatch:
    """Tokens of prompts whose log-probabilities are asked for, as columns."""

    rows: list[int] = field(default_factory=list)
    """Place in `StepPlan.token_ids` of the token before."""
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """How many of the likeliest tokens to name."""

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
    scores: ScoreBatch = field(default_factory=ScoreBatch)


@dataclass(slots=True)
class StepResult:
    """What a step sampled, in the order of `StepPlan.samples`."""

    token_ids: list[int]
    """A sampled id. Else that sequence ends: with `error`, as the logits were NOT_FINITE, its controls leave
    NO_TOKEN_LEFT or its GRAMMAR_FAILED; with `stop`, as by its grammar it is COMPLETE."""
    logprobs: list[TokenLogprob | None] | None = None
    """None if nobody asked; else an entry a sample, None where that one did not ask."""
    scores: list[TokenLogprob] = field(default_factory=list)
    """In the order of `StepPlan.scores`; NaN where logits were not finite."""


class Runner(Protocol):
    """Anything that turns a plan into a result: torch, a fake in tests, a simulator's clock."""

    def execute(self, plan: StepPlan) -> StepResult: ...
