"""Many steps of an engine at once, in which nothing happens but that each running sequence gets its next token.

Between two steps `find_run` looks how long it goes on like that: until the step in which a sequence ends. Whether a
message cuts it short is known only later, so a run is applied when it is over, for as many steps as there were. Then
everything is as `schedule` and `update` leave it after each of these steps: blocks are taken and entered into the
prefix cache in the same order. `tests/simulator/test_decode_run.py` compares the two.

One case is not looked for: a sequence whose tokens another one, running beside it, has cached already gives a block
back, and a waiting sequence that lacks that block starts with the run's end.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.plan import StepPlan
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence
from penstock.simulator.costs import StepCosts, StepShape

SHORTEST = 3
"""Steps that a run is made for."""


@dataclass(slots=True)
class DecodeRun:
    """Steps of the same sequences, one token each; the i-th takes `first + i * growth` seconds."""

    began: float
    num_sequences: int
    num_steps: int
    first: float
    growth: float

    def ends(self, num_steps: int) -> float:
        """When the first `num_steps` steps are over."""
        return self.began + num_steps * self.first + self.growth * (num_steps * (num_steps - 1) / 2)

    def steps_begun(self, now: float) -> int:
        """Steps that began before `now`, one at least: the last of them is under way, or ends now."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.ends(middle) >= now:
                high = middle
            else:
                low = middle + 1
        return low


def is_pure_decode(plan: StepPlan) -> bool:
    """Whether a step gives each of its sequences the one token that it lacks."""
    return len(plan.forward.token_ids) == len(plan.samples) == len(plan.forward.starts)


def find_run(scheduler: Scheduler, costs: StepCosts, now: float) -> DecodeRun | None:
    """The run that begins now, after a step of decodes alone; None if the next steps are not of that kind.

    The step in which a sequence ends is not a part of it.
    """
    running = scheduler.running
    if not running or not scheduler.is_steady:
        return None
    num_steps = min(seq.max_length - len(seq.tokens) for seq in running) - 1
    if num_steps < SHORTEST:
        return None
    keys = 0
    for seq in running:
        if len(seq.tokens) - seq.num_computed != 1 or seq.shares_tail or seq.siblings or seq.beams is not None:
            return None
        keys += len(seq.tokens)
    num_steps = _while_blocks_last(scheduler, num_steps)
    if num_steps < SHORTEST:
        return None
    count = len(running)
    first = costs.seconds(StepShape(count, count, keys, keys))
    growth = costs.seconds(StepShape(count, count, keys + count, keys + count)) - first
    return DecodeRun(now, count, num_steps, first, growth)


def _while_blocks_last(scheduler: Scheduler, num_steps: int) -> int:
    """How many of the steps need no more blocks than can be had."""
    kv = scheduler.kv
    size, left = kv.block_size, kv.num_available
    if -(-num_steps // size) * len(scheduler.running) <= left:
        return num_steps
    begun = sorted(
        step for seq in scheduler.running for step in range(-seq.num_computed % size + 1, num_steps + 1, size)
    )
    return num_steps if len(begun) <= left else begun[left] - 1


def apply_run(scheduler: Scheduler, num_steps: int, answers: "Mapping[str, array[int]]") -> None:
    """Give each running sequence `num_steps` tokens, as so many steps would.

    Args:
        answers: whole ones, by request.
    """
    kv, running = scheduler.kv, scheduler.running
    size = kv.block_size
    changes: list[tuple[int, int, int]] = []  # (step, 0 to take a block at its begin or 1 to enter one at its end, who)
    for place, seq in enumerate(running):
        tokens, computed = seq.tokens, seq.num_computed
        begun = len(tokens) - seq.num_prompt_tokens
        tokens.extend(answers[seq.request_id][begun : begun + num_steps])
        until_full = size - computed % size
        if until_full == size:
            changes.append((1, 0, place))
        while until_full <= num_steps:
            changes.append((until_full, 1, place))
            if until_full < num_steps:
                changes.append((until_full + 1, 0, place))
            until_full += size
        seq.num_computed = computed + num_steps
    changes.sort()
    for step, is_full, place in changes:
        _change(scheduler, running[place], num_steps - step, full=bool(is_full))
    scheduler.queue.served(running, num_steps)


def _change(scheduler: Scheduler, seq: Sequence, steps_left: int, *, full: bool) -> None:
    """A sequence enters a block, or takes one, `steps_left` steps before the end of a run that it has been given."""
    kv, at_end = scheduler.kv, seq.num_computed
    seq.num_computed = at_end - steps_left - (not full)
    if full:
        kv.commit(seq)
    else:
        has_room = kv.make_room(seq, [])
        assert has_room, "a run is longer than its blocks last"
        kv.extend_bounded([seq], [1])
    seq.num_computed = at_end
