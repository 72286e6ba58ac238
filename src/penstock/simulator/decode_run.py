"""Advances an engine by many pure decode steps at once: steps in which each running sequence gets one token.

A simulation is five times as fast with it, which is why it states once more what the scheduler does.

`find_run` counts the steps until a sequence ends. A message may interrupt the run later, so `apply_run` applies the
steps that took place, at its end. The state is then the one that `schedule` and `update` would leave after each of
these steps: blocks are allocated and entered into the prefix cache in the same order
(`tests/simulator/test_decode_run.py`).

Not modelled: a sequence that frees a block because a concurrent one has cached the same tokens. A sequence that waits
for that block starts at the end of the run.
"""

from array import array
from collections.abc import Mapping
from enum import IntEnum

from penstock.core.kv_manager import KVManager
from penstock.core.plan import StepPlan
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence
from penstock.dataclass import dataclass
from penstock.simulator.costs import StepCosts, StepShape

SHORTEST = 3
"""Minimum number of steps of a run."""


@dataclass(slots=True)
class DecodeRun:
    """Consecutive steps of the same sequences with one token each; step i takes `first + i * growth` seconds."""

    began: float
    num_sequences: int
    num_steps: int
    first: float
    growth: float

    def ends(self, num_steps: int) -> float:
        """The time at which the first `num_steps` steps end."""
        return self.began + num_steps * self.first + self.growth * (num_steps * (num_steps - 1) / 2)

    def steps_begun(self, now: float) -> int:
        """Number of steps that began before `now`, at least one; the last is under way or ends now."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.ends(middle) >= now:
                high = middle
            else:
                low = middle + 1
        return low


def is_pure_decode(plan: StepPlan) -> bool:
    """Whether each sequence of a step computes exactly its last token, and nothing else is computed."""
    return not plan.forward.encode and len(plan.forward.token_ids) == len(plan.samples) == len(plan.forward.starts)


def find_run(scheduler: Scheduler, costs: StepCosts, now: float) -> DecodeRun | None:
    """The run that can follow a pure decode step; None if the next steps are not pure decodes.

    The step in which a sequence ends is excluded.
    """
    running = scheduler.running
    if not running or not scheduler.is_steady:
        return None
    num_steps = min(seq.max_length - len(seq.tokens) for seq in running) - 1
    if num_steps < SHORTEST:
        return None
    keys = 0
    for seq in running:
        # Their next step forks, or copies a block, which a run does not model.
        if len(seq.tokens) - seq.num_computed != 1 or seq.shares_tail or seq.siblings or seq.beams is not None:
            return None
        if seq.num_computed < seq.image_end:
            return None
        keys += len(seq.tokens)
    num_steps = _while_blocks_last(scheduler, num_steps)
    if num_steps < SHORTEST:
        return None
    count = len(running)
    first = costs.seconds(StepShape(count, count, keys, keys))
    # Linear: each step reads one more key for each sequence, and all else stays.
    growth = costs.seconds(StepShape(count, count, keys + count, keys + count)) - first
    return DecodeRun(now, count, num_steps, first, growth)


def _while_blocks_last(scheduler: Scheduler, num_steps: int) -> int:
    """Number of steps for which there are enough blocks."""
    kv = scheduler.kv
    size, left = kv.block_size, kv.num_available
    if -(-num_steps // size) * len(scheduler.running) <= left:
        return num_steps
    begun = sorted(
        step for seq in scheduler.running for step in range(-seq.num_computed % size + 1, num_steps + 1, size)
    )
    return num_steps if len(begun) <= left else begun[left] - 1


def apply_run(scheduler: Scheduler, num_steps: int, answers: "Mapping[str, array[int]]") -> None:
    """Apply `num_steps` steps: each running sequence gets that many tokens.

    Args:
        answers: the complete answer of each request.
    """
    kv, running = scheduler.kv, scheduler.running
    size, has_others = kv.block_size, len(kv.pools) > 1
    changes: list[tuple[int, _Change, int]] = []  # (step, what, whose), as the steps would make them
    for place, seq in enumerate(running):
        tokens, computed = seq.tokens, seq.num_computed
        begun = len(tokens) - seq.num_prompt_tokens
        tokens.extend(answers[seq.request_id][begun : begun + num_steps])
        # Steps that fill a block, beginning with the last one before the run.
        for full in range(-(computed % size), num_steps + 1, size):
            if full > 0:
                changes.append((full, _Change.COMMIT, place))
            if 0 <= full < num_steps:
                changes.append((full + 1, _Change.MAKE_ROOM, place))
            if has_others:
                steps = range(max(full, 1), min(full + 2, num_steps) + 1)
                changes += [(step, _Change.EXTEND, place) for step in steps]
        seq.num_computed = computed + num_steps
    # By step, then in the order within a step: blocks are taken and released as single steps would.
    changes.sort()
    for step, change, place in changes:
        seq = running[place]
        at_end = seq.num_computed
        seq.num_computed = at_end - num_steps + step - (change is not _Change.COMMIT)
        _apply(kv, seq, change)
        seq.num_computed = at_end
    scheduler.queue.served(running, num_steps)


class _Change(IntEnum):
    """A sequence's changes of blocks in a step, in order."""

    MAKE_ROOM = 0
    EXTEND = 1
    COMMIT = 2


def _apply(kv: KVManager, seq: Sequence, change: _Change) -> None:
    if change is _Change.COMMIT:
        kv.commit(seq)
    elif change is _Change.EXTEND:
        kv.extend_bounded([seq], [1])
    else:
        has_room = kv.make_room(seq, [])
        assert has_room, "a run is longer than its blocks last"
