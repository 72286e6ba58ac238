"""Driving a model by hand: settings for a small checkpoint, and steps with any division of the texts into chunks."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import native
from penstock.checkpoint.checkpoint import Checkpoint, open_checkpoint
from penstock.config.engine_config import EngineConfig
from penstock.config.machine import Machine
from penstock.config.settings import Settings, resolve
from penstock.core.plan import ForwardPlan, NewBlocks, SampleBatch, SampledSequence, StepPlan
from penstock.kernels.attention import CacheShape, LayerCache, LayerCaches
from penstock.kernels.ops import Ops
from penstock.kernels.tables import make_ops
from penstock.models.registry import load_model, read_facts
from penstock.native.array import NoNativeKernelError
from penstock.runner.forward import KVCache, build_batch
from tests.support.params import GREEDY

if TYPE_CHECKING:
    import torch


def settings_for(folder: Path, **options: Any) -> tuple[Checkpoint, Settings]:
    """The checkpoint in `folder`, and settings with small blocks and one thread unless `options` say otherwise."""
    checkpoint = open_checkpoint(str(folder))
    defaults = {"block_size": 4, "kv_cache_memory": "2MiB", "threads": 1}
    config = EngineConfig.from_options(**(defaults | options))
    library = native.library()
    machine = Machine(
        options.get("device", "cpu"),
        cores=1,
        memory=2**32,
        native=library is not None,
        multiplies_bfloat16=library is not None and library.multiplies_bfloat16,
    )
    facts = read_facts(checkpoint, ranks=config.model.tensor_parallel_size)
    return checkpoint, resolve(config, facts, machine)


def spying(ops: Ops, backed: list[int]) -> Ops:
    """The operations, with caches that note up to which block their memory is to be ready."""

    def new_caches(shapes: Sequence[CacheShape]) -> LayerCaches:
        return replace(ops.new_caches(shapes), back=backed.append)

    return replace(ops, new_caches=new_caches)


def kept(cache: KVCache) -> list[LayerCache]:
    """What the layers keep that keep anything."""
    return [layer for layer in cache.layers if layer is not None]


def greedy_samples(positions: Sequence[int]) -> SampleBatch:
    """Greedy sampling after texts of `positions` tokens."""
    return SampleBatch(
        [SampledSequence(i, i, GREEDY, length, array("i", [0] * length)) for i, length in enumerate(positions)],
        [0] * len(positions),
        list(positions),
    )


def plan_of(
    parts: Sequence[tuple[int, Sequence[int]]],
    tables: "Sequence[array[int]]",
    sampled_rows: Sequence[int] = (),
    positions: Sequence[int] = (),
) -> StepPlan:
    """A step of (start, tokens) parts, in slots of their order; of all of them the block tables are new."""
    forward = ForwardPlan(
        query_lens=[len(tokens) for _, tokens in parts],
        starts=[start for start, _ in parts],
        token_ids=array("i", [token for _, tokens in parts for token in tokens]),
        slots=list(range(len(parts))),
        new_blocks=[NewBlocks(0, slot, 0, table) for slot, table in enumerate(tables)],
        block_copies=[],
        sampled_rows=list(sampled_rows),
    )
    return StepPlan(forward, greedy_samples(positions))


class Stepper:
    """A model and its cache, stepped over several texts that each get blocks scattered over the pool."""

    def __init__(self, folder: Path, num_texts: int, **options: Any) -> None:
        import torch

        from penstock.kernels.reference_ops import over_tensors, reference_ops

        checkpoint, settings = settings_for(folder, **options)
        self.device = torch.device(settings.device)
        try:
            self._load(checkpoint, settings, over_tensors(make_ops(self.device)))
        except NoNativeKernelError:
            self._load(checkpoint, settings, reference_ops())
        num_blocks = min(group.num_blocks for group in settings.memory.groups)
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        each = len(blocks) // num_texts
        self.tables = [array("i", blocks[index * each : (index + 1) * each]) for index in range(num_texts)]
        self.computed = [0] * num_texts

    def _load(self, checkpoint: Checkpoint, settings: Settings, ops: Ops) -> None:
        with ops.inference():
            self.ops, self.model = ops, load_model(checkpoint, settings, ops)
            self.cache = KVCache.of_model(self.model.spec, settings, ops)

    def step(self, parts: dict[int, list[int]]) -> "dict[int, torch.Tensor]":
        """Compute the next tokens `parts[i]` of the texts i, in one step; returns logits of each token, by text."""
        tables = [self._table(index, self.computed[index] + len(tokens)) for index, tokens in parts.items()]
        plan = plan_of([(self.computed[index], tokens) for index, tokens in parts.items()], tables).forward
        import torch

        with torch.inference_mode():
            batch = build_batch(plan, tables, self.cache.block_size, self.ops, self.device)
            self.model.positions.prepare(batch.positions)
            ids, positions = batch.tensor("token_ids"), batch.tensor("positions")
            hidden = self.model.forward(ids, positions, [batch] * len(self.cache.layers), self.cache.layers)
            logits = self.model.compute_logits(hidden, torch.arange(len(ids), device=self.device))
        for index, tokens in parts.items():
            self.computed[index] += len(tokens)
        return dict(zip(parts, logits.cpu().split(plan.query_lens), strict=True))

    def _table(self, index: int, length: int) -> "array[int]":
        return self.tables[index][: -(-length // self.cache.block_size)]
