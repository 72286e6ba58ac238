"""A step's plan as tensors: numpy on whole columns, and one transfer to the device."""

from dataclasses import dataclass

import numpy as np
import torch
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
    num_blocks = int(tables.max()) + 1
    positions, slots = _positions_and_slots(host, starts, tables, block_size)
    token_ids = np.frombuffer(plan.token_ids, np.int32).astype(np.int64)
    rows = np.array(plan.samples.rows, np.int64)
    columns: list[IntArray] = [host.query_start, host.seq_lens, tables.reshape(-1), slots]
    if packed:
        batch = PackedBatch(np.concatenate(columns), len(positions), len(query_lens), tables.shape[1])
        ids, places, sampled = (torch.from_numpy(column) for column in (token_ids, positions, rows))
        return StepInputs(ids, places, batch, sampled, num_blocks)
    columns += [host.decode_order(), token_ids, positions, rows]
    query_start, seq_lens, flat_tables, slots_, decode_order, ids, places, sampled = torch.split(
        torch.from_numpy(np.concatenate(columns)).to(device), [len(column) for column in columns]
    )
    attention_batch = build_batch(
        host,
        query_start,
        seq_lens,
        flat_tables.view(tables.shape),
        slots_,
        decode_order,
        block_size=block_size,
        gather_limit=gather_limit,
    )
    return StepInputs(ids, places, attention_batch, sampled, num_blocks)


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
