"""The runner of a multi-token-prediction head, beside that of its model."""

from array import array

import torch
from torch import Tensor

from penstock.checkpoint import Checkpoint
from penstock.core.draft_model import OWN_HIDDEN
from penstock.core.plan import StepPlan, StepResult
from penstock.errors import DeviceLostError
from penstock.models.registry import load_mtp
from penstock.runner.forward import KVCache, build_batch
from penstock.runner.torch_runner import BlockTables, TorchRunner, is_device_lost
from penstock.sampling.sampler import Sampler
from penstock.settings import Settings


class MTPRunner:
    """Holds the head's weights and its KV cache, and executes one step at a time. See `MTPSteps` for the methods.

    Raises:
        CheckpointError: the head's weights are damaged, incomplete or of an unknown kind.
    """

    blocks = None

    def __init__(self, target: TorchRunner, checkpoint: Checkpoint, settings: Settings) -> None:
        """
        Args:
            target: the model's runner, which keeps hidden states.
        """
        assert target.hidden is not None, "the model's runner keeps what the head starts from"
        self._hidden, self._ops = target.hidden, target.ops
        self._device = torch.device(settings.device)
        with torch.inference_mode():
            self._head = load_mtp(checkpoint, settings, self._ops, target.model)
            self._cache = KVCache(self._head.spec, settings, self._ops)
        self._block_tables = BlockTables(len(settings.memory.groups), settings.max_num_seqs)
        self._sampler = Sampler(self._ops, settings.max_num_seqs)
        self._last: dict[int, Tensor] = {}
        """By sequence, what the head made of its last token in the last step."""

    def execute_after(self, plan: StepPlan, hidden: "array[int]") -> StepResult:
        try:
            return self._execute(plan, hidden)
        except Exception as error:
            if is_device_lost(error):
                raise DeviceLostError(f"the device is lost: {error}") from error
            raise

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, hidden: "array[int]") -> StepResult:
        forward = plan.forward
        assert len(hidden) == len(forward.token_ids)
        self._block_tables.update(forward.new_blocks)
        self._cache.copy(forward.block_copies)
        tables = self._block_tables.of(forward.slots)
        batches = [
            build_batch(forward, of_group, self._cache.block_size, self._ops, self._device) for of_group in tables
        ]
        self._cache.back([batch.pool_blocks for batch in batches])
        before = self._before(plan, hidden)
        (batch,), (cache,) = self._cache.by_layer(batches), self._cache.layers
        mixed = self._head.mix_tokens(before, batch, cache)
        if not len(plan.samples):
            return StepResult([])
        normed = self._head.finish(mixed, torch.tensor(forward.sampled_rows, dtype=torch.int64, device=self._device))
        self._last = {seq.sequence_id: row for seq, row in zip(plan.samples.sequences, normed, strict=True)}
        return self._sampler.sample(self._head.logits(normed), plan.samples)

    def _before(self, plan: StepPlan, hidden: "array[int]") -> Tensor:
        """The hidden state before each token of the step: [num_tokens, hidden_size]."""
        rows = self._hidden.load(torch.tensor(hidden, dtype=torch.int64, device=self._device))
        for seq, row in zip(plan.samples.sequences, plan.forward.sampled_rows, strict=True):
            if hidden[row] == OWN_HIDDEN:
                rows[row] = self._last[seq.sequence_id]
        return rows

    def close(self) -> None:
        """Give the memory back; the runner is of no use afterwards."""
        del self._head, self._cache, self._hidden, self._last
