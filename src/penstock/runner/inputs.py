"""A step's plan as tensors: numpy on whole columns, and one transfer to the device, or one native call."""

import ctypes
import functools
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock import native
from penstock.core.plan import ForwardPlan
from penstock.kernels.paged_attention import AttentionBatch, PackedBatch, build_batch
from penstock.kernels.paged_attention.batch import BatchOnHost, IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a model's forward pass takes; all int64, on the device."""

    token_ids: Tensor
    """[num_tokens]"""
    positions: Tensor
    """[num_tokens]"""
    batch: AttentionBatch
    sampled_rows: Tensor
    """[num_samples]: for each sample the row of the token before it."""


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """What native kernels take, in the CPU's memory; all int64."""

    token_ids: IntArray
    positions: IntArray
    batch: PackedBatch
    num_blocks: int
    """The pool's blocks up to the last that the step uses."""


def build_inputs(
    plan: ForwardPlan, block_tables: "list[array[int]]", block_size: int, gather_limit: int, device: torch.device
) -> StepInputs:
    """Lay out `plan`, whose sequences have these block tables; see `build_batch` for `gather_limit`."""
    query_lens = np.array(plan.query_lens, np.int64)
    starts = np.array(plan.starts, np.int64)
    host = BatchOnHost.of(query_lens, starts)
    tables = _pad_tables(block_tables)
    positions, slots = _positions_and_slots(host, starts, tables, block_size)
    token_ids = np.frombuffer(plan.token_ids, np.int32).astype(np.int64)
    rows = np.array(plan.sampled_rows, np.int64)
    columns = [host.query_start, host.seq_lens, tables.reshape(-1), slots, host.decode_order()]
    columns += [token_ids, positions, rows]
    query_start, seq_lens, flat_tables, slots_, decode_order, ids, places, sampled = torch.split(
        torch.from_numpy(np.concatenate(columns)).to(device), [len(column) for column in columns]
    )
    batch = build_batch(
        host,
        query_start,
        seq_lens,
        flat_tables.view(tables.shape),
        slots_,
        decode_order,
        block_size=block_size,
        gather_limit=gather_limit,
    )
    return StepInputs(ids, places, batch, sampled)


def _pad_tables(block_tables: "list[array[int]]") -> IntArray:
    """The block tables as one array [num_seqs, most blocks], padded with 0."""
    lengths = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    padded = np.zeros((len(lengths), int(lengths.max())), np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(block_tables), np.int32)
    return padded


def _positions_and_slots(
    host: BatchOnHost, starts: IntArray, tables: IntArray, block_size: int
) -> tuple[IntArray, IntArray]:
    """Of every token of the step: its position in its sequence, and its slot in the cache."""
    rows = np.repeat(np.arange(len(starts)), host.query_lens)
    positions = np.arange(host.query_start[-1]) + (starts - host.query_start[:-1])[rows]
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    return positions, slots


def build_packed_inputs(plan: ForwardPlan, block_tables: "list[array[int]]", block_size: int) -> PackedInputs:
    """Lay out `plan` for the native kernels, by one call.

    Each of numpy's many would miss the processor's caches, through which all weights pass in every step.
    """
    table_lens = list(map(len, block_tables))
    num_tokens, num_seqs, table_width = len(plan.token_ids), len(table_lens), max(table_lens)
    assert sum(plan.query_lens) == num_tokens
    numbers = array("q", plan.query_lens + plan.starts + table_lens)
    columns = 2 * num_seqs + 1 + num_seqs * table_width + num_tokens
    memory = np.empty(columns + 2 * num_tokens, np.int64)
    num_blocks = _lay_out()(
        numbers.buffer_info()[0],
        b"".join(block_tables),
        plan.token_ids.buffer_info()[0],
        num_seqs,
        table_width,
        block_size,
        memory.__array_interface__["data"][0],  # `ctypes.data` is slower
    )
    assert num_blocks > 0, "a block table ends before its sequence"
    batch = PackedBatch(memory, num_tokens, num_seqs, table_width)
    positions, token_ids = memory[columns : columns + num_tokens], memory[columns + num_tokens :]
    return PackedInputs(token_ids, positions, batch, num_blocks)


@functools.cache
def _lay_out() -> Callable[..., int]:
    library = native.library()
    assert library is not None
    return library.function("penstock_lay_out", "psplllp", ctypes.c_int64)
