"""A step's plan as tensors: numpy on whole columns, and one transfer to the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import StepPlan
from penstock.kernels.paged_attention import Batch, PackedBatch, build_batch
from penstock.kernels.paged_attention.batch import BatchOnHost, IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a model's forward pass takes; all int64, on the device."""

    token_ids: Tensor
    """[num_tokens]"""
    positions: Tensor
    """[num_tokens]"""
    batch: Batch
    sampled_rows: Tensor
    """[num_samples]: for each sample the row of the token before it."""
    num_blocks: int
    """The pool's blocks up to the last that the step uses."""


def build_inputs(
    plan: StepPlan, block_size: int, gather_limit: int, device: torch.device, *, packed: bool = False
) -> StepInputs:
    """Lay out `plan`, for native kernels if `packed`; else see `build_batch` for `gather_limit`."""
    query_lens = np.array(plan.query_lens, np.int64)
    starts = np.array(plan.starts, np.int64)
    host = BatchOnHost.of(query_lens, starts)
    tables = pad_tables(plan)
    positions, slots = _positions_and_slots(host, starts, tables, block_size)
    columns: list[NDArray[Any]] = [
        host.query_start,
        host.seq_lens,
        tables.reshape(-1),
        slots,
        np.frombuffer(plan.token_ids, np.int32),
        positions,
        np.array(plan.samples.rows, np.int64),
    ]
    if not packed:
        columns.append(host.decode_order())
    memory = np.concatenate(columns, dtype=np.int64)
    query_start, seq_lens, flat_tables, slots_, token_ids, positions_, sampled_rows, *rest = torch.split(
        torch.from_numpy(memory).to(device), [len(column) for column in columns]
    )
    if packed:
        batch: Batch = PackedBatch(memory, len(positions), len(query_lens), tables.shape[1])
    else:
        batch = build_batch(
            host,
            query_start,
            seq_lens,
            flat_tables.view(tables.shape),
            slots_,
            rest[0],
            block_size=block_size,
            gather_limit=gather_limit,
        )
    return StepInputs(token_ids, positions_, batch, sampled_rows, int(tables.max()) + 1)


def pad_tables(plan: StepPlan) -> IntArray:
    """The block tables of a plan as one array [num_seqs, most blocks], padded with 0."""
    lengths = np.fromiter(map(len, plan.block_tables), np.int64, len(plan.block_tables))
    padded = np.zeros((len(lengths), int(lengths.max())), np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(plan.block_tables), np.int32)
    return padded


def _positions_and_slots(
    host: BatchOnHost, starts: IntArray, tables: IntArray, block_size: int
) -> tuple[IntArray, IntArray]:
    """Of every token of the step: its position in its sequence, and its slot in the cache."""
    rows = np.repeat(np.arange(len(starts)), host.query_lens)
    positions = np.arange(host.query_start[-1]) + (starts - host.query_start[:-1])[rows]
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    return positions, slots
