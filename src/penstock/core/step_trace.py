"""What a step did to whom, and why the head of the queue was left waiting: for whoever asks afterwards."""

from dataclasses import dataclass, field
from typing import Literal

BlockReason = Literal["budget", "slots", "blocks", "admission", "preemption"]
"""What keeps the head of the queue from joining a step:

- budget: the step's tokens are given out;
- slots: `max_num_seqs` sequences run;
- blocks: too few KV blocks can be had;
- admission: the admission policy lets nobody (more) join;
- preemption: a running sequence just lost its blocks, so nobody joins.
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
