"""Small fleets for tests, whose steps take times that no two sums of them have in common."""

import math
from dataclasses import replace
from typing import Any

from penstock.config.memory import LayerGroup, MemoryPlan
from penstock.config.settings import Settings
from penstock.simulator.costs import MeasuredCosts
from penstock.simulator.simulation import Fleet

COSTS = MeasuredCosts(((1, math.pi / 500), (16, math.e / 300), (512, 0.0431)), 3.3e-8, 4.7e-9, 1.13e-5)


def make_settings(
    *,
    num_blocks: int = 1000,
    block_size: int = 32,
    windows: tuple[int, ...] = (),
    checkpoint_every: int | None = None,
    **changes: Any,
) -> Settings:
    """An engine of 16 sequences; `windows` are those of bounded groups, `checkpoint_every` makes one of states."""
    groups = [LayerGroup((), None, num_blocks), *(LayerGroup((), window, num_blocks) for window in windows)]
    if checkpoint_every is not None:
        groups.append(LayerGroup((), None, 16 + num_blocks // checkpoint_every, checkpoint_every))
    settings = Settings(
        model_name="simulated",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        quantization=None,
        packed_cache=None,
        device="cpu",
        threads=1,
        seed=None,
        max_model_len=8192,
        enable_prefix_caching=True,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        policy="fair",
        admission=None,
        speculation=None,
        memory=MemoryPlan(0, 0, 0, tuple(groups), block_size),
    )
    return replace(settings, **changes)


def make_fleet(num_engines: int = 1, *, settings: Settings | None = None, **changes: Any) -> Fleet:
    return Fleet(settings or make_settings(), COSTS, num_engines, **changes)
