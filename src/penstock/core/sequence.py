"""A sequence: one stream of tokens, and the number of those whose keys and values are computed."""

import sys
from array import array
from enum import Enum, auto

from penstock.api.request import Request
from penstock.api.sampling_params import MAX_N
from penstock.core.beam import BeamSearch
from penstock.core.image_positions import rope_shift
from penstock.core.plan import SampledSequence
from penstock.core.prefix_cache import Node

INT32 = "i"
NOT_YET = sys.maxsize
NO_SLOT = -1


class Status(Enum):
    """State of a sequence. `WAITING` and `RUNNING` may alternate; `FINISHED` is final."""

    UNBORN = auto()
    """One of n > 1, whose prompt a sibling is still computing."""
    PARKED = auto()
    """A beam without blocks, which has its candidates and waits for the other beams."""
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class BlockTable:
    """A sequence's blocks of one cache group, in order."""

    __slots__ = ("blocks", "first", "num_sent")

    def __init__(self, blocks: "array[int]", first: int = 0) -> None:
        self.blocks = blocks
        self.first = first
        """Number of blocks behind the group's window, which were released and are never read."""
        self.num_sent = 0
        """Number of leading blocks that the runner has in the sequence's slot."""

    @property
    def held(self) -> "array[int]":
        """The blocks held by the sequence."""
        return self.blocks[self.first :] if self.first else self.blocks

    def keep_sent(self, most: int) -> None:
        """Limit the blocks known to the runner to those before this index, as later ones have changed."""
        self.num_sent = min(self.num_sent, most)


class Sequence:
    """One token stream of a request. Modified only by the scheduler, its sequence table and the KV manager."""

    __slots__ = (
        "beams",
        "first_scheduled",
        "image_end",
        "index",
        "max_length",
        "min_length",
        "node",
        "num_cached_tokens",
        "num_charged",
        "num_committed",
        "num_computed",
        "num_drafts",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_returned",
        "num_slots",
        "ordinal",
        "params",
        "reported",
        "request",
        "request_id",
        "rope_shift",
        "sampled",
        "sequence_id",
        "shares_tail",
        "siblings",
        "slot",
        "status",
        "stop_ids",
        "tables",
        "tokens",
        "turn",
    )

    def __init__(self, request: Request, index: int, ordinal: int) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.params = params
        self.index = index
        self.ordinal = ordinal  # of its request, in order of arrival
        self.sequence_id = ordinal * MAX_N + index  # unique
        self.turn = NOT_YET  # of its request, in order of first admission; set by the queue, if its order needs it
        self.tokens = array(INT32, request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.status = Status.WAITING if index == 0 else Status.UNBORN
        self.stop_ids = frozenset(params.stop_token_ids)
        self.min_length = len(self.tokens) + params.min_tokens
        self.max_length = len(self.tokens) + params.max_tokens
        self.num_computed = 0  # tokens whose keys and values are in the cache
        self.num_drafts = 0  # drafts at the end of `tokens` during a step; 0 between steps
        self.num_returned = 0  # accepted drafts after the computed tokens, whose states were dropped
        # prompt tokens that need not be computed for the log-probability of the next one
        self.num_prompt_logprobs = 0 if params.prompt_logprobs is not None else self.num_prompt_tokens - 1
        self.beams: BeamSearch | None = None  # the search it belongs to
        self.slot = NO_SLOT  # of its state in the runner, while it has blocks
        self.sampled: SampledSequence | None = None  # the sampler's state in this slot
        self.tables: list[BlockTable] = []  # one per cache group, while it has a slot
        self.shares_tail = False  # its last block may be shared with a sibling: copy before writing
        self.node: Node | None = None  # its deepest block's node in the prefix tree
        self.num_committed = 0  # leading blocks that are in the prefix tree
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it first ran
        self.num_charged = 0  # prompt tokens that its tenant is not charged for (any more), if the queue charges
        self.first_scheduled: float | None = None
        self.reported = False  # whether the first output was returned, with its metadata
        self.siblings: list[Sequence] = []  # unborn: they fork from this one, or wait, once its prompt is computed
        images = request.images
        self.image_end = images[-1].start + images[-1].count if images else 0  # number of tokens up to the last image
        self.rope_shift = rope_shift(images) if images else 0  # rotary position minus index of tokens after the images
        self.num_slots = 1  # slots it holds while it runs: its own, and those reserved for its first siblings

    @property
    def min_slots(self) -> int:
        """Minimum number of slots it needs to run: one per beam of a search, otherwise one."""
        return 1 if self.beams is None else 1 + len(self.siblings)

    @property
    def forks(self) -> "list[Sequence]":
        """Siblings with a reserved slot."""
        return self.siblings[: self.num_slots - 1]

    def take_slot(self, slot: int, tables: "list[BlockTable]") -> None:
        """Assign a sequence slot, whose state the runner must rebuild, and block tables, one per cache group."""
        self.slot = slot
        self.tables = tables
        self.renew_sampled()

    def renew_sampled(self) -> None:
        """Make the sampler rebuild its state, because tokens it may have counted have changed."""
        self.sampled = SampledSequence(self.slot, self.sequence_id, self.params, self.num_prompt_tokens, self.tokens)

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether all requested log-probabilities of its prompt are computed."""
        return self.num_prompt_logprobs >= self.num_prompt_tokens - 1

    @property
    def num_reusable(self) -> int:
        """Number of its tokens that need not be computed if their keys are in the prefix cache."""
        return len(self.tokens) - 1 if self.has_prompt_logprobs else self.num_prompt_logprobs

    def __repr__(self) -> str:
        return (
            f"<{self.request.request_id}[{self.index}] {self.status.name.lower()} "
            f"{self.num_computed}/{len(self.tokens)} tokens, {sum(len(table.held) for table in self.tables)} blocks>"
        )
