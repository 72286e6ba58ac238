"""Drafters that run a model: a second, smaller model with the same vocabulary, or the model's own MTP head.

The draft model has its own KV cache, and a shadow of each sequence: the same tokens in its own blocks. It first
computes the tokens that are new since the last call, all sequences together; then it decodes, one token a pass. It
samples with the random numbers of the target's tokens, so drafts match whenever the two models agree, not only where
both are certain.
"""

from array import array
from dataclasses import replace
from typing import Protocol

from penstock.core.kv_manager import KVManager
from penstock.core.plan import Runner, StepPlan, StepResult
from penstock.core.sequence import INT32, Sequence
from penstock.core.speculation import NO_DRAFT, Draft
from penstock.core.step import Step
from penstock.dataclass import dataclass


@dataclass(slots=True, eq=False)
class _Shadow:
    """A sequence in the draft model."""

    seq: Sequence
    """Holds the target's tokens, followed by the latest drafts."""
    known: int
    """How many of its tokens are the target's."""


class DraftModel:
    """Drafts tokens with a second, smaller model in `runner`, which alone uses the blocks of `kv`."""

    free = False

    def __init__(self, runner: Runner | None, kv: KVManager, max_num_batched_tokens: int) -> None:
        """
        Args:
            runner: None if a subclass overrides `_execute`.
        """
        self._runner = runner
        self._kv = kv
        self._budget = max_num_batched_tokens
        self._shadows: dict[int, _Shadow] = {}

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        drafts = iter(self._propose([entry for entry in wanted if not entry[0].image_end]))
        # It sees no images: what it drafted for a text with one would seldom be accepted.
        return [NO_DRAFT if seq.image_end else next(drafts) for seq, _ in wanted]

    def _propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        shadows = [self._follow(seq) for seq, _ in wanted]
        guessing = [
            (shadow.seq, shadow.known + limit)
            for shadow, (_, limit) in zip(shadows, wanted, strict=True)
            if self._has_blocks(shadow, shadows)
        ]
        first = True
        while guessing:
            grown = self._step([seq for seq, _ in guessing], commit=first)
            guessing = [(seq, end) for seq, end in guessing if seq in grown and len(seq.tokens) < end]
            first = False
        return [shadow.seq.tokens[shadow.known :] for shadow in shadows]

    def forget_sequence(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq.sequence_id, None)
        if shadow is not None:
            self._kv.release(shadow.seq)

    def _follow(self, seq: Sequence) -> _Shadow:
        """The sequence's shadow, updated to its tokens; keys of rejected drafts are dropped."""
        shadow = self._shadows.get(seq.sequence_id)
        if shadow is None:
            copy = Sequence(seq.request, seq.index, seq.ordinal)
            copy.sequence_id = ~seq.sequence_id  # separate state in the sampler
            # Same seed and controls, so that a draft is the very token that the target would sample.
            copy.params = replace(seq.params, logprobs=None, prompt_logprobs=None)
            copy.num_prompt_logprobs = copy.num_prompt_tokens - 1
            shadow = self._shadows[seq.sequence_id] = _Shadow(copy, 0)
            copy.tokens = seq.tokens[:]
        copy, same = shadow.seq, shadow.known
        while same < min(len(copy.tokens), len(seq.tokens)) and copy.tokens[same] == seq.tokens[same]:
            same += 1
        if same < len(copy.tokens) and copy.sampled is not None:
            copy.renew_sampled()
        copy.tokens[same:] = seq.tokens[same:]
        # The last token is computed in any case: its logits are what the next draft is sampled from.
        copy.num_computed = min(copy.num_computed, same, len(copy.tokens) - 1)
        shadow.known = len(copy.tokens)
        # Committed blocks are in the tree and cannot change: the shadow begins again, with its hits in the cache.
        if copy.num_computed < max(1, copy.num_committed * self._kv.block_size):
            self._kv.release(copy)
        self._kv.shrink(copy)
        return shadow

    def _has_blocks(self, shadow: _Shadow, asked: list[_Shadow]) -> bool:
        """Whether the shadow has blocks for its tokens; if not, shadows that are not asked for release theirs."""
        seq = shadow.seq
        if seq.tables:
            return self._has_room(seq)
        if self._kv.admit(seq, 0) is None:
            return True
        # Room for the step's sequences first; the others' keys may stay in the prefix cache.
        for other in self._shadows.values():
            if other not in asked:
                self._kv.release(other.seq)
        return self._kv.admit(seq, 0) is None

    def _has_room(self, seq: Sequence) -> bool:
        lacking = len(seq.tokens) - seq.num_computed
        return self._kv.grow(seq, lacking) == lacking

    def _step(self, sequences: list[Sequence], *, commit: bool) -> set[Sequence]:
        """Compute missing tokens within the budget; sequences with none left then sample one, and are returned."""
        step = Step(self._budget, self._budget)
        for seq in sequences:
            if self._has_room(seq):
                step.add_chunk(seq, len(seq.tokens) - seq.num_computed)
        if not step.sequences:
            return set()
        self._kv.extend_bounded(step.sequences, step.query_lens)
        result = self._execute(step)
        for seq, count in zip(step.sequences, step.query_lens, strict=True):
            seq.num_computed += count
            if commit:
                self._kv.commit(seq)
        grown = set()
        for seq, token in zip(step.sampled, result.token_ids, strict=True):
            if token is not None:
                seq.tokens.append(token)
                if token not in seq.stop_ids:
                    grown.add(seq)
        return grown

    def _execute(self, step: Step) -> StepResult:
        assert self._runner is not None
        return self._runner.execute(step.plan())


NO_HIDDEN, OWN_HIDDEN = -1, -2


class MTPSteps(Protocol):
    """The runner of a multi-token prediction (MTP) head."""

    def execute_after(self, plan: StepPlan, hidden: "array[int]") -> StepResult:
        """Compute the plan's tokens and sample its sampled rows.

        Args:
            hidden: for each token, where the hidden state of the previous token is: its slot in the model's KV cache;
                NO_HIDDEN for none, OWN_HIDDEN for the head's own output in the previous step.
        """
        ...


class MTPDrafter(DraftModel):
    """Drafts tokens with the model's multi-token prediction head.

    It predicts the first draft from the model's hidden state, and each later one from its own. Its first step for a
    text computes the head's keys and values of all tokens so far.
    """

    def __init__(self, runner: MTPSteps, kv: KVManager, max_num_batched_tokens: int) -> None:
        super().__init__(None, kv, max_num_batched_tokens)
        self._head = runner
        self._originals: dict[Sequence, Sequence] = {}
        """The target's sequences to draft for, by their shadows."""

    def _propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        self._originals = {self._follow(seq).seq: seq for seq, _ in wanted}
        return super()._propose(wanted)

    def _execute(self, step: Step) -> StepResult:
        hidden = array(INT32)
        for seq, count in zip(step.sequences, step.query_lens, strict=True):
            hidden.extend(self._hidden_before(seq, seq.num_computed, seq.num_computed + count))
        return self._head.execute_after(step.plan(), hidden)

    def _hidden_before(self, shadow: Sequence, first: int, last: int) -> "array[int]":
        """Locations of the hidden states before its tokens from `first` to `last`."""
        original, size = self._originals[shadow], self._kv.block_size
        blocks = original.tables[0].blocks
        slots = array(INT32)
        for position in range(first - 1, last - 1):
            if position < 0:
                slots.append(NO_HIDDEN)
            elif position < len(original.tokens) - 1:  # all but the last have been computed
                slots.append(blocks[position // size] * size + position % size)
            else:
                slots.append(OWN_HIDDEN)
        return slots
