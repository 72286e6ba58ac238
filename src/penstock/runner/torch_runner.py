"""The runner that computes: a plan in, sampled tokens out, on one device."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.checkpoint import Checkpoint
from penstock.config import Settings
from penstock.core.plan import StepPlan, StepResult
from penstock.kernels.kv_store import PackedCache
from penstock.kernels.paged_attention import Batch
from penstock.models.decoder import Decoder
from penstock.models.registry import load_model
from penstock.runner.inputs import build_inputs
from penstock.runner.kv_cache import KVCache
from penstock.runner.recorded import RecordedLayers
from penstock.sampling.sampler import sample

CPU_GATHER_BYTES = 2 * 2**20
"""Of keys gathered at one time: few enough to be in a core's cache still when they are read."""


class TorchRunner:
    """Holds the weights and the KV cache, and executes one step at a time.

    Raises:
        CheckpointError: the checkpoint's weights are damaged, incomplete or of an unknown kind.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._device = torch.device(settings.device)
        with torch.inference_mode():
            self._model = load_model(checkpoint, settings)
            self._cache = KVCache(self._model.config, settings)
            self._layers = _make_layers(self._model, self._cache, settings)
        self._gather_limit = _gather_limit(settings, self._cache)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the plan's tokens, store their keys and values, and sample where it says so."""
        if plan.block_copies:
            self._cache.copy(plan.block_copies)
        if not plan.query_lens:
            return StepResult([])
        inputs = build_inputs(plan, self._cache.block_size, self._gather_limit, self._device, packed=self._cache.packed)
        x, angles = self._model.embed(inputs.token_ids), self._model.rotary.angles(inputs.positions)
        logits = self._model.logits(*self._layers(x, angles, inputs.batch), inputs.sampled_rows)
        if not len(plan.samples):
            return StepResult([])
        return sample(logits, plan.samples)

    def close(self) -> None:
        """Give the memory back; the runner is of no use afterwards."""
        del self._model, self._cache, self._layers
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _make_layers(
    model: Decoder, cache: KVCache, settings: Settings
) -> Callable[[Tensor, Tensor, Batch], tuple[Tensor, Tensor]]:
    """`Decoder.run_layers`, recorded where its kernels are native."""
    packed = [layer for layer in cache.layers if isinstance(layer, PackedCache)]
    if cache.packed:
        return RecordedLayers(model, packed, settings.max_num_batched_tokens, getattr(torch, settings.dtype))
    return functools.partial(model.run_layers, caches=cache.layers)


def _gather_limit(settings: Settings, cache: KVCache) -> int:
    """Keys that attention may gather at one time: what the memory plan reckons with, or less where that is faster."""
    planned = 2 * settings.max_model_len
    if settings.device != "cpu":
        return planned
    token_bytes = settings.memory.kv_cache // (2 * len(cache.layers) * settings.memory.num_tokens)
    return min(planned, CPU_GATHER_BYTES // token_bytes)
