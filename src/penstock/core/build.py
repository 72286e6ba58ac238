"""Builds the scheduler from the settings, without a runner and without torch."""

import time
from collections.abc import Callable

from penstock.config.memory import MemoryPlan
from penstock.config.settings import Settings
from penstock.core.block_tier import BlockTier
from penstock.core.fairness import QUEUE_POLICIES
from penstock.core.kv_manager import CacheGroup, KVManager
from penstock.core.policies import AdmissionPolicy, TgiAdmission
from penstock.core.scheduler import Scheduler
from penstock.core.speculation import Speculation


def make_scheduler(
    settings: Settings,
    speculation: Speculation | None = None,
    clock: Callable[[], float] = time.monotonic,
    make_tier: Callable[[KVManager], BlockTier] | None = None,
) -> Scheduler:
    """Build a scheduler with an empty cache.

    Args:
        make_tier: builds the tier below the prefix cache; None: there is none.
    """
    memory = settings.memory
    kv = KVManager(
        cache_groups(memory),
        memory.block_size,
        settings.max_num_seqs,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    return Scheduler(
        kv,
        QUEUE_POLICIES[settings.policy](),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        admission=_make_admission(settings),
        speculation=speculation,
        tier=None if make_tier is None else make_tier(kv),
        images=settings.images,
        clock=clock,
        overflow_advice=settings.overflow_advice,
    )


def cache_groups(memory: MemoryPlan) -> tuple[CacheGroup, ...]:
    """The cache groups that a memory plan has pools for."""
    return tuple(CacheGroup(group.num_blocks, group.window, group.checkpoint_every) for group in memory.groups)


def _make_admission(settings: Settings) -> AdmissionPolicy | None:
    controls = settings.admission
    if controls is None:
        return None
    return TgiAdmission(
        block_size=settings.memory.block_size,
        max_batch_prefill_tokens=controls.max_batch_prefill_tokens,
        max_batch_total_tokens=controls.max_batch_total_tokens,
        waiting_served_ratio=controls.waiting_served_ratio,
        max_waiting_tokens=controls.max_waiting_tokens,
    )
