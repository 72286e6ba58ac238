"""The contract between scheduler and runner: plain data, no torch.

A `StepPlan` is one forward pass over a ragged batch, and what to sample from it. The pass is stored as columns: entry
`i` of each column of `ForwardPlan` belongs to the step's i-th sequence. `token_ids` concatenates the tokens of all
sequences:

    query_lens      3         1    4
    token_ids       a b c     d    e f g h
    starts          32        71   0            (tokens of the sequence that are already in the KV cache)
    slots           5         0    2            (sequence slots)

The runner computes keys and values of these tokens at positions `start .. start + query_len - 1`, and samples from the
rows in `sampled_rows`.

While it has blocks, a sequence has a *sequence slot*, from 0 to `max_num_seqs - 1`. There the runner keeps the
sequence's state between steps: its block tables, which plans update by differences, and its sampling state. A runner
executes each plan once, in the order of creation.
"""

from array import array
from dataclasses import field
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from penstock.api.request import Adapter, Image, TokenLogprob
from penstock.api.sampling_params import ResolvedParams
from penstock.dataclass import dataclass

if TYPE_CHECKING:  # the core runs without numpy
    import numpy as np
    from numpy.typing import NDArray


class Ending(Enum):
    """Why a sequence ends without a sampled token."""

    NOT_FINITE = auto()
    """A logit is NaN or plus infinity, or all are minus infinity."""
    NO_TOKEN_LEFT = auto()
    """The request's controls ban every token."""
    GRAMMAR_FAILED = auto()
    GRAMMAR_COMPLETE = auto()
    """The answer is complete, and its grammar allows nothing after it."""


class PendingMask(Protocol):
    """The tokens that a grammar allows, computed while the forward pass runs."""

    rows: list[int]
    """The masked samples, ascending; others may take any token."""

    def result(self) -> "NDArray[np.int32]":
        """[len(rows), vocab / 32 rounded up]: one bit per token, lowest first, set if allowed. May block."""
        ...


class NewBlocks(NamedTuple):
    """An update of a block table."""

    group: int
    """Cache group, as an index in the memory plan."""
    slot: int
    kept: int
    """Number of leading blocks that stay; 0 if the slot was newly assigned."""
    blocks: "array[int]"
    """int32 block ids that follow, replacing any others."""


class BlockCopy(NamedTuple):
    """A block to copy in all layers of a cache group."""

    group: int
    source: int
    target: int


class StateBranch(NamedTuple):
    """A block for a sequence's state after some of its tokens in the step; the state after the others is elsewhere."""

    group: int
    seq_index: int
    """Index of the sequence in the step."""
    block: int
    after: int
    """Number of tokens before the branch."""


class EncodePart(NamedTuple):
    """Layers of the vision tower to compute for one image, before the step's forward pass."""

    digest: bytes
    first: int
    """First layer, and the layer after the last. The first part includes the patch embedding, the last one the
    connector."""
    last: int
    image: Image | None
    """The image, in the part that begins with layer 0; the runner keeps the stream between parts."""


class ImageRows(NamedTuple):
    """Rows of a step whose embeddings are features of an image."""

    digest: bytes
    first: int
    """Index of the first feature of the image."""
    rows: "array[int]"
    """int32 indices in `ForwardPlan.token_ids`; they take consecutive features."""


@dataclass(slots=True)
class ForwardPlan:
    """Inputs of the forward pass; see the module's docstring."""

    query_lens: list[int]
    starts: list[int]
    token_ids: "array[int]"
    """int32 [sum(query_lens)]."""
    slots: list[int]
    new_blocks: list[NewBlocks]
    """Updates after which each sequence's block tables, one per cache group, cover at least `start + query_len` tokens.
    Blocks behind the group's window no longer belong to the sequence and must not be read. A table may end in blocks
    that the sequence has released."""
    block_copies: list[BlockCopy]
    """Copies to make before anything is computed or written."""
    sampled_rows: list[int]
    """For each sample, the index in `token_ids` of the token before it. A row occurs `n` times where one prompt starts
    `n` sequences."""
    adapters: list[Adapter | None] = field(default_factory=list)
    """One per sequence; empty if none has an adapter."""
    branches: list[StateBranch] = field(default_factory=list)
    """For sequences with drafts, one per group of states."""
    encode: list[EncodePart] = field(default_factory=list)
    """Layers of the vision tower to compute first. A step may have some and no tokens."""
    image_rows: list[ImageRows] = field(default_factory=list)
    freed_images: list[bytes] = field(default_factory=list)
    """Digests of images whose features, or partly computed streams, the runner frees before anything else. One may be
    unknown to it after a failed step, or be encoded again in the same step."""
    rope_positions: "array[int] | None" = None
    """int32 [3 * tokens], axis by axis (time, height, width), for models with multi-axis rotary positions; None: each
    axis has the token's plain position."""
    windows: list[bytes] = field(default_factory=list)
    """Digests of the audio windows that the sequences attend to, one per sequence; empty: the model takes none."""
    seen_ends: "array[int] | None" = None
    """int32 [tokens], the position after the last key that each token attends to, for models whose images' tokens see
    each other; None: its own position + 1."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """The assignment of a slot to a sequence. Each assignment is a new object, even for the same sequence."""

    slot: int
    sequence_id: int
    """Unique number of the sequence."""
    params: ResolvedParams
    prompt_len: int
    tokens: "array[int]"
    """Prompt and answer: the scheduler's own array, since copying would take time proportional to each history.

    It may be read while the step executes. The scheduler modifies it only before and after, on the same thread; the
    only other reader, the mask thread, copies a slice under Python's lock, and the sampler waits for it. If a step
    fails before that, its sequences end, and their masks are not read. Between two samples the array only grows, apart
    from drafts at its end."""


@dataclass(slots=True)
class SampleBatch:
    """The samples of a step, as columns."""

    sequences: list[SampledSequence] = field(default_factory=list)
    """The sequence that provides history and controls. Samples of one sequence are adjacent, by ascending position."""
    indices: list[int] = field(default_factory=list)
    """Index of the new token's sequence in its request: with `params.seed` and the position, the key of its random
    numbers. The first tokens of `n > 1` differ only in this: their sequences have no slots yet."""
    positions: list[int] = field(default_factory=list)
    """Position of the new token in its sequence, prompt included; the tokens before it are its history."""
    mask: PendingMask | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def has_grammars(self) -> bool:
        """Whether any sample has a grammar."""
        return any(seq.params.structured is not None for seq in self.sequences)


@dataclass(slots=True)
class PromptLogprobsBatch:
    """Prompt tokens whose log-probabilities are requested, as columns."""

    rows: list[int] = field(default_factory=list)
    """Index in `ForwardPlan.token_ids` of the previous token."""
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
    """Sampled tokens of a step, in the order of `StepPlan.samples`."""

    token_ids: list[int | None]
    """None if the sequence ends without a token: see `endings`."""
    logprobs: list[TokenLogprob | None] | None = None
    """None if no sample requests them; else one entry per sample, None where not requested."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """In the order of `StepPlan.prompt_logprobs`; NaN where logits were not finite."""
    endings: dict[int, Ending] = field(default_factory=dict)
    """By sample index."""
    broken_images: list[bytes] = field(default_factory=list)
    """Digests of images whose features are not finite; their requests end."""

    def end(self, sample: int, ending: Ending) -> None:
        """End a sample's sequence without a token."""
        self.token_ids[sample] = None
        self.endings[sample] = ending


class Runner(Protocol):
    """Executes plans: a `DeviceRunner`, a fake in tests, a simulator's clock."""

    def execute(self, plan: StepPlan) -> StepResult: ...


BlockReason = Literal["budget", "slots", "blocks", "admission", "preemption", "loading"]
"""What keeps the head of the queue from joining a step:

- budget: the step's token budget is used up;
- slots: `max_num_seqs` sequences run;
- blocks: too few KV blocks are available;
- admission: the admission policy admits no (more) sequences;
- loading: blocks of its text are being loaded from a file (`core.block_tier`);
- preemption: a running sequence was just preempted, so none is admitted.
"""


@dataclass(slots=True)
class StepTrace:
    """One step, by request ids. Requests that are not named decoded, or waited behind the head of the queue."""

    num_tokens: int = 0
    num_sequences: int = 0
    encoded_tokens: int = 0
    """Cost of the vision tower's layers, in tokens."""
    num_drafted: int = 0
    """Drafted tokens that were verified, and how many were accepted."""
    num_accepted: int = 0
    admitted: list[tuple[str, int]] = field(default_factory=list)
    """Requests with their number of tokens found in the prefix cache."""
    chunks: list[tuple[str, int]] = field(default_factory=list)
    """Requests with their number of computed tokens, if more than one; drafts are not included."""
    preempted: list[str] = field(default_factory=list)
    blocked: tuple[str, BlockReason] | None = None
    """The head of the queue at the end of the step, if any request waits."""
