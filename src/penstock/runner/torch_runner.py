"""The runner that computes: a plan in, sampled tokens out, on one device."""

import torch

from penstock.checkpoint import Checkpoint
from penstock.config import Settings
from penstock.core.plan import ScoreBatch, StepPlan, StepResult
from penstock.kernels.ops import make_ops
from penstock.models.registry import load_model
from penstock.request import TokenLogprob
from penstock.runner.kv_cache import KVCache
from penstock.runner.recorded import make_forward
from penstock.sampling.logprobs import token_logprobs
from penstock.sampling.sampler import sample


class TorchRunner:
    """Holds the weights and the KV cache, and executes one step at a time.

    Raises:
        CheckpointError: the checkpoint's weights are damaged, incomplete or of an unknown kind.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._device = torch.device(settings.device)
        self._max_rows = settings.max_num_seqs
        self._ops = make_ops(self._device)
        with torch.inference_mode():
            self._model = load_model(checkpoint, settings, self._ops)
            self._cache = KVCache(self._model.config, settings, self._ops)
            self._forward = make_forward(
                self._model,
                self._cache,
                self._ops,
                self._device,
                max_tokens=settings.max_num_batched_tokens,
                max_rows=self._max_rows,
            )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the plan's tokens, store their keys and values, and sample where it says so."""
        if plan.block_copies:
            self._cache.copy(plan.block_copies)
        if not plan.query_lens:
            return StepResult([])
        logits = self._forward(plan)
        result = sample(self._ops, logits, plan.samples) if len(plan.samples) else StepResult([])
        if len(plan.scores):
            result.scores = self._score(plan.scores)
        return result

    def _score(self, scores: ScoreBatch) -> list[TokenLogprob]:
        """Log-probabilities of a prompt's tokens, in portions: so many rows of logits the memory plan reckons with."""
        entries: list[TokenLogprob] = []
        for begin in range(0, len(scores), self._max_rows):
            part = slice(begin, begin + self._max_rows)
            logits = self._forward.logits(scores.rows[part])
            entries += token_logprobs(self._ops, logits, scores.token_ids[part], scores.counts[part])
        return entries

    def close(self) -> None:
        """Give the memory back; the runner is of no use afterwards."""
        del self._model, self._cache, self._forward
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
