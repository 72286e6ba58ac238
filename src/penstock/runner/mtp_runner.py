"""The runner of a multi-token prediction head, which uses its model's runner: one in each rank."""

from array import array
from collections.abc import Callable
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.settings import Settings
from penstock.core.draft_model import OWN_HIDDEN
from penstock.core.plan import ForwardPlan, StepPlan, StepResult
from penstock.dataclass import dataclass
from penstock.errors import DeviceLostError
from penstock.kernels.array_types import A
from penstock.models.registry import load_mtp
from penstock.runner.device_runner import BlockTables, DeviceRunner
from penstock.runner.forward import KVCache, build_batch
from penstock.runner.mtp_forward import MTPForward, make_mtp_forward
from penstock.runner.torch_device import is_device_lost
from penstock.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class MTPStep:
    """A step of the head, as all ranks compute it."""

    forward: ForwardPlan
    hidden: "array[int]"
    """See `MTPSteps`."""
    sampled: list[int]
    """Sequence ids of the sampled rows."""


def _alone(step: MTPStep) -> None:
    """Do nothing: there are no other ranks."""


class MTPRunner(Generic[A]):
    """Holds the head's weights and its KV cache, and executes one step at a time. See `MTPSteps` for the methods.

    Raises:
        CheckpointError: the head's weights are damaged, incomplete or of an unknown kind.
    """

    blocks = None

    def __init__(
        self,
        target: DeviceRunner[A],
        checkpoint: Checkpoint,
        settings: Settings,
        share: Callable[[MTPStep], None] = _alone,
    ) -> None:
        """
        Args:
            target: the model's runner, which keeps hidden states.
            share: sends a step to the other ranks, before this one computes it.
        """
        self._share = share
        assert target.hidden is not None, "the model's runner keeps what the head starts from"
        self._hidden, self._ops = target.hidden, target.ops
        self._device = settings.device
        with self._ops.inference():
            self._head = load_mtp(checkpoint, settings, self._ops, target.model)
            self._cache = KVCache.of_model(self._head.spec, settings, self._ops)
            self._forward: MTPForward[A] = make_mtp_forward(
                self._head,
                self._cache.layers[0],
                self._hidden,
                self._ops,
                max_tokens=settings.max_num_batched_tokens,
                max_rows=settings.max_num_seqs,
            )
        self._block_tables = BlockTables(len(settings.memory.groups), settings.max_num_seqs)
        self._sampler = Sampler(self._ops, settings.max_num_seqs)
        self._last: dict[int, int] = {}
        """By sequence, the row of the head's output for its last token in the last step with samples."""

    def execute_after(self, plan: StepPlan, hidden: "array[int]") -> StepResult:
        """See `MTPSteps`. With several ranks, no step can follow one that failed: the ranks would be out of step."""
        step = MTPStep(plan.forward, hidden, [seq.sequence_id for seq in plan.samples.sequences])
        try:
            self._share(step)
            with self._ops.inference():
                logits = self._compute(step)
                return StepResult([]) if logits is None else self._sampler.sample(logits, plan.samples)
        except Exception as error:
            if is_device_lost(error):
                raise DeviceLostError(f"the device is lost: {error}") from error
            if self._ops.collective.ranks.size > 1 and not isinstance(error, DeviceLostError):
                raise DeviceLostError(f"a step of the head in several ranks failed: {error}") from error
            raise

    def follow(self, step: MTPStep) -> None:
        """The part of `execute_after` before sampling, for ranks other than rank 0."""
        with self._ops.inference():
            self._compute(step)

    def _compute(self, step: MTPStep) -> A | None:
        """The step's logits; None: nothing is sampled."""
        forward = step.forward
        assert len(step.hidden) == len(forward.token_ids)
        self._block_tables.update(forward.new_blocks)
        # Before the step writes, as in the model's own cache.
        self._cache.copy(forward.block_copies)
        tables = self._block_tables.of(forward.slots)
        batches = [
            build_batch(forward, of_group, self._cache.block_size, self._ops, self._device) for of_group in tables
        ]
        self._cache.back([batch.pool_blocks for batch in batches])
        (batch,) = self._cache.by_layer(batches)
        logits = self._forward.run(batch, self._before(step), forward.sampled_rows)
        if step.sampled:
            self._last = {sequence_id: self._hidden.own_row(index) for index, sequence_id in enumerate(step.sampled)}
        return logits

    def _before(self, step: MTPStep) -> NDArray[np.int64]:
        """The row of the hidden state before each token of the step."""
        rows = self._hidden.rows_of(step.hidden)
        for sequence_id, row in zip(step.sampled, step.forward.sampled_rows, strict=True):
            if step.hidden[row] == OWN_HIDDEN:
                rows[row] = self._last[sequence_id]
        return rows

    def close(self) -> None:
        """Free the memory; the runner cannot be used afterwards."""
        del self._head, self._cache, self._hidden, self._forward
