"""The runner that computes: a plan in, sampled tokens out, on one device."""

import torch

from penstock.checkpoint import Checkpoint
from penstock.config import Settings
from penstock.core.plan import StepPlan, StepResult
from penstock.models.registry import load_model
from penstock.runner.inputs import build_inputs
from penstock.runner.kv_cache import KVCache
from penstock.sampling.sampler import sample


class TorchRunner:
    """Holds the weights and the KV cache, and executes one step at a time.

    Raises:
        CheckpointError: the checkpoint's weights are damaged, incomplete or of an unknown kind.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._device = torch.device(settings.device)
        self._gather_limit = 2 * settings.max_model_len  # what `config._workspace` reckons with
        with torch.inference_mode():
            self._model = load_model(checkpoint, settings)
            self._cache = KVCache(self._model.config, settings)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the plan's tokens, store their keys and values, and sample where it says so."""
        if plan.block_copies:
            self._cache.copy(plan.block_copies)
        if not plan.query_lens:
            return StepResult([])
        inputs = build_inputs(plan, self._cache.block_size, self._gather_limit, self._device)
        logits = self._model.forward(
            inputs.token_ids, inputs.positions, inputs.batch, self._cache.layers, inputs.sampled_rows
        )
        if not len(plan.samples):
            return StepResult([])
        return sample(logits, plan.samples)

    def close(self) -> None:
        """Give the memory back; the runner is of no use afterwards."""
        del self._model, self._cache
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
