"""The contract between scheduler and runner: plain data, no torch.

A `StepPlan` is one forward pass over a ragged batch, and what to sample from it. The pass is given as columns: entry
`i` of each column of `ForwardPlan` is of the step's i-th sequence. Its `token_ids` are those of all sequences, one
after another:

    query_lens      3         1    4
    token_ids       a b c     d    e f g h
    starts          32        71   0            (how many tokens of the sequence are in the KV cache already)
    slots           5         0    2            (sequence slots)

The runner computes keys and values of these tokens at positions `start .. start + query_len - 1`, and samples after the
rows in `sampled_rows`.

A sequence has a *sequence slot*, from 0 to `max_num_seqs - 1`, for as long as it has blocks. What the runner keeps of a
sequence from step to step lies there: its block tables, which plans change by differences, and its sampling state. A
runner executes each plan once, in the order in which they were made.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.request import Adapter, TokenLogprob
from penstock.sampling_params import ResolvedParams

if TYPE_CHECKING:  # the core runs without numpy
    import numpy as np
    from numpy.typing import NDArray

from typing import Literal


class Ending(Enum):
    """Why a sample has no token: its sequence ends."""

    NOT_FINITE = auto()
    """A logit is NaN or plus infinity, or all are minus infinity."""
    NO_TOKEN_LEFT = auto()
    """The request's controls rule out every token."""
    GRAMMAR_FAILED = auto()
    GRAMMAR_COMPLETE = auto()
    """The answer is whole, and its grammar allows nothing after it."""


class PendingMask(Protocol):
    """Which tokens a grammar allows, being computed while the forward pass runs."""

    rows: list[int]
    """The samples that are masked, ascending; all others may take any token."""

    def result(self) -> "NDArray[np.int32]":
        """[len(rows), vocab / 32 rounded up]: a bit a token, the lowest first, set where it is allowed. May wait."""
        ...


class NewBlocks(NamedTuple):
    """A change of a block table."""

    group: int
    """The cache group, by its place in the memory plan."""
    slot: int
    kept: int
    """How many blocks, from the first on, stay; 0 when the slot was assigned anew."""
    blocks: "array[int]"
    """int32 block ids that come after these, in place of any others."""


class BlockCopy(NamedTuple):
    """A block to copy, in all layers of a cache group."""

    group: int
    source: int
    target: int


class StateBranch(NamedTuple):
    """A block in which a sequence's state goes on after some of its tokens of the step: what these made of it stays."""

    group: int
    place: int
    """Of the sequence in the step."""
    block: int
    after: int
    """So many of its tokens."""


@dataclass(slots=True)
class ForwardPlan:
    """What the forward pass computes; see the module's docstring."""

    query_lens: list[int]
    starts: list[int]
    token_ids: "array[int]"
    """int32, `sum(query_lens)` of them."""
    slots: list[int]
    new_blocks: list[NewBlocks]
    """With these the block tables of each sequence, one a cache group, cover at least `start + query_len` tokens.
    Blocks behind the group's window are not the sequence's any more: they must not be read. A table may go on with
    blocks that the sequence gave back."""
    block_copies: list[BlockCopy]
    """To be made before anything is computed or written."""
    sampled_rows: list[int]
    """For each sample the index in `token_ids` of the token before it. A row is there `n` times where one prompt starts
    `n` sequences."""
    adapters: list[Adapter | None] = field(default_factory=list)
    """Those of the sequences; []: none has one."""
    branches: list[StateBranch] = field(default_factory=list)
    """Of sequences with drafts, one a group of states."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """A sequence in its slot. Each assignment of a slot makes another one, also for the same sequence."""

    slot: int
    sequence_id: int
    """A number of the sequence that no other ever has."""
    params: ResolvedParams
    prompt_len: int
    tokens: "array[int]"
    """Prompt and answer: the scheduler's own array, as a copy would cost a step the length of every history.

    It may be read while the step executes. The scheduler changes it only before and after, on the same thread; the one
    other reader, the masks' thread, copies a slice under Python's lock, and is waited for by the sampler. If a
    step fails before, its sequences end, and their masks are not read. Between two samples the array only grows, apart
    from drafts at its end."""


@dataclass(slots=True)
class SampleBatch:
    """What to sample, as columns."""

    sequences: list[SampledSequence] = field(default_factory=list)
    """Whose history and controls count. Samples of one sequence stand together, by ascending position."""
    indices: list[int] = field(default_factory=list)
    """The new token's sequence in its request: with `params.seed` and the position, the key of its random numbers. The
    first tokens of `n > 1` differ in this alone: their sequences have no slots yet."""
    positions: list[int] = field(default_factory=list)
    """The position that the new token will have in its sequence, prompt included; the tokens before it are its
    history."""
    mask: PendingMask | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def has_grammars(self) -> bool:
        """Whether a grammar constrains any of the samples."""
        return any(seq.params.structured is not None for seq in self.sequences)


@dataclass(slots=True)
class PromptLogprobsBatch:
    """Tokens of prompts whose log-probabilities are asked for, as columns."""

    rows: list[int] = field(default_factory=list)
    """Index in `ForwardPlan.token_ids` of the token before."""
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Number of top alternatives to return."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class StepPlan:
    """One step: the forward pass, the samples, and the prompt log-probabilities."""

    forward: ForwardPlan
    samples: SampleBatch = field(default_factory=SampleBatch)
    prompt_logprobs: PromptLogprobsBatch = field(default_factory=PromptLogprobsBatch)


@dataclass(slots=True)
class StepResult:
    """What a step sampled, in the order of `StepPlan.samples`."""

    token_ids: list[int | None]
    """None where the sequence ends without a token: `endings` says why."""
    logprobs: list[TokenLogprob | None] | None = None
    """None if no sample asks for them; else one entry per sample, None where not asked for."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """In the order of `StepPlan.prompt_logprobs`; NaN where logits were not finite."""
    endings: dict[int, Ending] = field(default_factory=dict)
    """By sample."""

    def end(self, sample: int, ending: Ending) -> None:
        """Let a sample have no token, and its sequence end."""
        self.token_ids[sample] = None
        self.endings[sample] = ending


class Runner(Protocol):
    """Anything that turns a plan into a result: torch, a fake in tests, a simulator's clock."""

    def execute(self, plan: StepPlan) -> StepResult: ...


BlockReason = Literal["budget", "slots", "blocks", "admission", "preemption", "loading"]
"""What keeps the head of the queue from joining a step:

- budget: the step's tokens are given out;
- slots: `max_num_seqs` sequences run;
- blocks: too few KV blocks can be had;
- admission: the admission policy admits no (more) sequences;
- loading: blocks of its text are on their way from a file (`core.block_tier`);
- preemption: a running sequence just lost its blocks, so none is admitted.
"""


@dataclass(slots=True)
class StepTrace:
    """One step, by request ids. Who is not named decoded, or waited behind the head of the queue."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_drafted: int = 0
    """Tokens that were guessed beforehand, and how many of them turned out right."""
    num_accepted: int = 0
    admitted: list[tuple[str, int]] = field(default_factory=list)
    """And how many tokens of it were in the prefix cache."""
    chunks: list[tuple[str, int]] = field(default_factory=list)
    """And how many tokens of it were computed, where that is more than one; drafts are not named."""
    preempted: list[str] = field(default_factory=list)
    blocked: tuple[str, BlockReason] | None = None
    """The head of the queue at the step's end, if anybody waits."""
