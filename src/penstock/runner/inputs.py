"""A step's plan as batches: numbers laid out once, read by every backend's kernels."""

from array import array

import torch

from penstock.core.plan import ForwardPlan
from penstock.kernels.batch import Batch
from penstock.kernels.ops import Ops


def build_batch(
    plan: ForwardPlan, block_tables: "list[array[int]]", block_size: int, ops: Ops, device: torch.device
) -> Batch:
    """The batch of `plan`'s tokens for a cache group in which its sequences have these block tables."""
    memory, pool_blocks = ops.lay_out(plan.query_lens, plan.starts, block_tables, plan.token_ids, block_size)
    return Batch(memory, len(plan.query_lens), len(plan.token_ids), pool_blocks, device)
