"""Plans and scheduling for encoders: steps of whole texts. Plain data, no torch."""

import time
from array import array
from collections.abc import Callable
from dataclasses import field
from typing import Protocol

from penstock.api.request import EXPIRED, ErrorReason, FinishReason, Request, SequenceOutput
from penstock.core.plan import StepTrace
from penstock.core.policies import QueuePolicy
from penstock.core.sequence import INT32, Sequence
from penstock.dataclass import dataclass


@dataclass(slots=True)
class EncoderPlan:
    """One forward pass over a ragged batch of whole texts."""

    token_ids: "array[int]" = field(default_factory=lambda: array(INT32))
    """int32, the concatenated tokens of all texts."""
    lengths: list[int] = field(default_factory=list)
    """Number of tokens per text."""
    second_texts: list[int] = field(default_factory=list)
    """Per text, index of the first token of token type 1; 0: none."""


class VectorRunner(Protocol):
    """A runner that computes vectors of texts."""

    def execute(self, plan: EncoderPlan) -> list[bytes | None]:
        """The vector of each text, float32; None if it is not finite."""
        ...

    def close(self) -> None:
        """Free its memory."""
        ...


class EncoderScheduler:
    """Waiting texts in the order of a queue policy; a step takes as many as fit its budget.

    A text's cost is the number of tokens in the blocks its keys fill. A text longer than the budget is computed alone.
    """

    def __init__(
        self,
        queue: QueuePolicy,
        *,
        budget: int,
        block_size: int,
        max_num_seqs: int,
        clock: Callable[[], float] = time.monotonic,
        overflow_advice: str = "",
    ) -> None:
        """
        Args:
            overflow_advice: what helps where a vector is not finite, for errors.
        """
        self._advice = overflow_advice
        self._queue, self._budget, self._block_size, self._max_num_seqs = queue, budget, block_size, max_num_seqs
        self._clock = clock
        self._waiting: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._unsent: list[SequenceOutput] = []
        self._num_arrived = 0
        self.trace = StepTrace()  # of the latest step

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a text waits, or an ending has not been returned yet."""
        return bool(self._waiting or self._unsent)

    def add_request(self, request: Request) -> None:
        """Add a text that fits the model."""
        seq = Sequence(request, 0, self._num_arrived)
        self._num_arrived += 1
        self._waiting[request.request_id] = seq
        self._queue.push(seq)

    def finish_request(self, request_id: str, reason: FinishReason) -> None:
        """End a waiting text; unknown ids are ignored."""
        self._end(request_id, SequenceOutput(request_id, 0, [], finish_reason=reason))

    def expire(self, request_id: str) -> None:
        """End a text that has waited too long."""
        error = SequenceOutput(request_id, 0, [], finish_reason=FinishReason.ERROR, error=EXPIRED)
        error.error_reason = ErrorReason.EXPIRED
        self._end(request_id, error)

    def withdraw(self, request_id: str) -> bool:
        """Remove a waiting text without an ending. Returns whether it was waiting."""
        seq = self._waiting.pop(request_id, None)
        if seq is not None:
            self._queue.remove(seq)
        return seq is not None

    def _end(self, request_id: str, output: SequenceOutput) -> None:
        if self.withdraw(request_id):
            self._unsent.append(output)

    def drain(self) -> list[SequenceOutput]:
        """Endings that no step produced, each once."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def schedule(self) -> EncoderPlan | None:
        """The next step, or None if no text waits."""
        plan, left, now = EncoderPlan(), self._budget, self._clock()
        self.trace = StepTrace()
        while (seq := self._queue.peek()) is not None and len(self._running) < self._max_num_seqs:
            count = len(seq.tokens)
            left -= -(-count // self._block_size) * self._block_size
            # A text longer than the budget is computed alone.
            if left < 0 and self._running:
                self.trace.blocked = (seq.request_id, "budget")
                break
            self._queue.admit(seq)
            self._queue.prefilled(seq, count)
            del self._waiting[seq.request_id]
            seq.first_scheduled = now
            self._running.append(seq)
            plan.token_ids.extend(seq.tokens)
            plan.lengths.append(count)
            plan.second_texts.append(seq.request.second_text)
            self.trace.admitted.append((seq.request_id, 0))
            self.trace.chunks.append((seq.request_id, count))
        self.trace.num_tokens, self.trace.num_sequences = len(plan.token_ids), len(self._running)
        return plan if self._running else None

    def request_indices(self) -> list[int]:
        """Requests in the current step, as indices in order of arrival."""
        return [seq.ordinal for seq in self._running]

    def update(self, vectors: list[bytes | None]) -> list[SequenceOutput]:
        """Outputs of the step's texts, each complete, and endings that no step produced."""
        outputs = self.drain()
        for seq, vector in zip(self._running, vectors, strict=True):
            reason = FinishReason.ERROR if vector is None else FinishReason.STOP
            error = f"the model gave a number that is not finite{self._advice}" if vector is None else None
            outputs.append(self._output(seq, reason, error, vector))
        self._running.clear()
        return outputs

    def fail_step(self, error: str) -> list[SequenceOutput]:
        """End the current step's texts with `error` after it failed."""
        outputs = self.drain() + [self._output(seq, FinishReason.ERROR, error) for seq in self._running]
        self._running.clear()
        return outputs

    def _output(
        self, seq: Sequence, reason: FinishReason, error: str | None, vector: bytes | None = None
    ) -> SequenceOutput:
        return SequenceOutput(
            seq.request_id,
            0,
            [],
            finish_reason=reason,
            error=error,
            first_scheduled=seq.first_scheduled,
            vector=vector,
        )
