"""A step under construction: its sequences, their numbers of tokens, and the resulting plan for the runner."""

from array import array
from collections.abc import Iterable
from dataclasses import field

from penstock.api.request import Adapter
from penstock.core.plan import (
    BlockCopy,
    EncodePart,
    ForwardPlan,
    NewBlocks,
    PromptLogprobsBatch,
    SampleBatch,
    StateBranch,
    StepPlan,
    StepTrace,
)
from penstock.core.prefix_cache import NO_BLOCK
from penstock.core.sequence import INT32, Sequence
from penstock.core.states import StateTable
from penstock.dataclass import dataclass


@dataclass(slots=True)
class Step:
    """What a step contains so far; `plan` finalises it."""

    budget: int
    """Tokens that may still be added."""
    prefill_budget: int
    """Tokens of the budget available to prompts."""
    sequences: list[Sequence] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    num_decodes: int = 0
    """Number of sequences that lack one token; they come first."""
    num_returned: int = 0
    """Number of sequences after these that also lack accepted drafts whose states were dropped."""
    encode: list[EncodePart] = field(default_factory=list)
    encoding: list[Sequence] = field(default_factory=list)
    """The sequences for which images are encoded."""
    copies: list[BlockCopy] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    """The sequence of each sample; set by `plan`. The samples of one sequence are adjacent."""
    prompt_logprobs: PromptLogprobsBatch = field(default_factory=PromptLogprobsBatch)
    num_prompt_logprobs: list[tuple[Sequence, int]] = field(default_factory=list)
    """(Sequence, number of prompt log-probabilities); set by `plan`."""
    trace: StepTrace = field(default_factory=StepTrace)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Add one token for each of these sequences, which lack one token."""
        assert not self.sequences, "decodes come first"
        self.num_decodes = len(sequences)
        self.sequences = sequences
        self.query_lens = [1] * len(sequences)
        self.budget -= len(sequences)

    def add_returned(self, seq: Sequence, keep: int) -> bool:
        """Add all that a sequence lacks after its drafts were dropped; False if it exceeds the budget.

        Args:
            keep: budget reserved for others.
        """
        assert len(self.sequences) == self.num_decodes + self.num_returned, "prompts come after"
        lacking = len(seq.tokens) - seq.num_computed
        if lacking > self.budget - keep:
            return False
        self.sequences.append(seq)
        self.query_lens.append(lacking)
        self.budget -= lacking
        self.num_returned += 1
        return True

    @property
    def room(self) -> int:
        """Tokens of prompts, or their like, that may still be added."""
        return min(self.budget, self.prefill_budget)

    def add_layers(self, part: EncodePart, seq: Sequence, cost: int) -> None:
        """Add layers of the vision tower for an image of the sequence, which cost as much as so many tokens."""
        known = next((index for index, planned in enumerate(self.encode) if planned.digest == part.digest), None)
        if known is None:
            self.encode.append(part)
        else:
            self.encode[known] = self.encode[known]._replace(last=part.last)
        self.encoding.append(seq)
        self.trace.encoded_tokens += cost
        self.budget = max(0, self.budget - cost)
        self.prefill_budget = max(0, self.prefill_budget - cost)

    def add_chunk(self, seq: Sequence, most: int, keep: int = 0) -> int:
        """Add at most this many missing tokens of the sequence, as the budgets allow minus `keep`; returns how many."""
        chunk = min(most, self.room - keep)
        if chunk <= 0:
            return 0
        self.sequences.append(seq)
        self.query_lens.append(chunk)
        self.budget -= chunk
        self.prefill_budget -= chunk
        return chunk

    @property
    def requests(self) -> list[Sequence]:
        """The sequences for which the step computes tokens or encodes images."""
        return self.sequences + [seq for seq in self.encoding if seq not in self.sequences]

    def add_drafts(self, index: int, tokens: Iterable[int]) -> None:
        """Add drafts to the sequence of this index, which lacks nothing else; `Scheduler.update` verifies them."""
        seq = self.sequences[index]
        known = len(seq.tokens)
        seq.tokens.extend(tokens)
        seq.num_drafts = len(seq.tokens) - known
        self.query_lens[index] += seq.num_drafts
        self.budget -= seq.num_drafts
        self.trace.num_drafted += seq.num_drafts

    def plan(self) -> StepPlan:
        """The plan for the runner: a sample after each sequence's last token, and before each of its drafts."""
        sampled = self.sampled
        samples = SampleBatch()
        starts = [seq.num_computed for seq in self.sequences]
        token_ids = array(INT32)
        rows: list[int] = []
        for seq, start, count in zip(self.sequences, starts, self.query_lens, strict=True):
            tokens = seq.tokens
            if count == 1:
                token_ids.append(tokens[start])
            else:
                token_ids.extend(tokens[start : start + count])
                if not seq.num_drafts:
                    self.trace.chunks.append((seq.request_id, count))
            if not seq.has_prompt_logprobs:
                self._add_prompt_logprobs(seq, start, count, len(token_ids) - count)
            end, last = len(tokens), len(token_ids) - 1
            if start + count < end or seq.max_length == seq.num_prompt_tokens:
                continue
            state = seq.sampled
            assert state is not None, f"{seq} has no slot"
            for behind in range(seq.num_drafts, 0, -1):
                sampled.append(seq)
                samples.sequences.append(state)
                rows.append(last - behind)
                samples.positions.append(end - behind)
            for sibling in (seq, *seq.forks) if seq.beams is None else (seq,):
                sampled.append(sibling)
                samples.sequences.append(state)
                rows.append(last)
                samples.positions.append(end)
        self.trace.num_tokens, self.trace.num_sequences = len(token_ids), len(self.sequences)
        samples.indices = [seq.index for seq in sampled]
        forward = ForwardPlan(
            self.query_lens,
            starts,
            token_ids,
            [seq.slot for seq in self.sequences],
            self._new_blocks(),
            self.copies,
            rows,
            self._adapters(),
            self._branches() if self.trace.num_drafted else [],
        )
        return StepPlan(forward, samples, self.prompt_logprobs)

    def _branches(self) -> list[StateBranch]:
        return [
            StateBranch(group, index, table.branch, count - seq.num_drafts)
            for index, (seq, count) in enumerate(zip(self.sequences, self.query_lens, strict=True))
            for group, table in enumerate(seq.tables)
            if isinstance(table, StateTable) and table.branch != NO_BLOCK
        ]

    def _adapters(self) -> list[Adapter | None]:
        adapters = [seq.request.adapter for seq in self.sequences]
        return adapters if any(adapters) else []

    def _new_blocks(self) -> list[NewBlocks]:
        """Block table updates that the runner does not have."""
        new: list[NewBlocks] = []
        for seq in self.sequences:
            for group, table in enumerate(seq.tables):
                if table.num_sent < len(table.blocks):
                    new.append(NewBlocks(group, seq.slot, table.num_sent, table.blocks[table.num_sent :]))
                    table.num_sent = len(table.blocks)
        return new

    def _add_prompt_logprobs(self, seq: Sequence, start: int, count: int, row: int) -> None:
        """Request log-probabilities of the prompt tokens after row `row` and the following rows."""
        first, last = seq.num_prompt_logprobs, min(start + count, seq.num_prompt_tokens - 1)
        if first >= last:
            return
        assert start <= first, f"{seq} has keys of tokens whose log-probabilities are still to be computed"
        batch = self.prompt_logprobs
        batch.rows.extend(range(row + first - start, row + last - start))
        batch.token_ids.extend(seq.tokens[first + 1 : last + 1])
        batch.counts.extend([seq.params.prompt_logprobs or 0] * (last - first))
        self.num_prompt_logprobs.append((seq, last - first))
