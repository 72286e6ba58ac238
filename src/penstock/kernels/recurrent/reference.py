"""Recurrent operations in plain torch: causal convolution, gated delta rule, state space scans, gated norm.

Everything is computed in float32 and rounded once, to the dtype of the activations. Sigmoid, SiLU and softplus are
composed of `exp` and `log1p`, whose results do not depend on an element's place in a tensor; those of torch's own
versions do.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.dataclass import dataclass
from penstock.kernels.batch import NO_BRANCH, Batch
from penstock.kernels.recurrent import ConvColumns, ConvWeight, DeltaShape, Gates, ScanShape
from penstock.kernels.recurrent.states import CopyRows, StateCaches, StatePart, StateShape, states_in
from penstock.system.allocator import Allocator


def new_states(shape: StateShape, allocator: Allocator, copy_rows: CopyRows[Tensor]) -> StateCaches[Tensor]:
    """Allocate the states in one piece; on a CPU the operating system zeroes pages on first touch."""
    if torch.device(shape.device).type == "cpu":
        pool = torch.from_numpy(allocator.zeros(4 * shape.elements)).view(torch.float32)
    else:
        pool = torch.zeros(shape.elements, dtype=torch.float32, device=shape.device)
    return states_in(pool, shape, copy_rows, lambda part: part)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of a sequence whose states share a block."""

    rows: slice
    """Rows of the step."""
    source: int | None
    """Block of the state before the first token; None: zeros."""
    target: int
    """Block of the state after the last token."""


def plan_runs(batch: Batch, block_size: int) -> list[Run]:
    """Divide a step's tokens into runs, in order within each sequence."""
    first_row, seq_lens, table_start, blocks = (
        batch.column(name).tolist() for name in ("query_start", "seq_lens", "table_start", "blocks")
    )
    branches = batch.branches
    runs = []
    for seq, length in enumerate(seq_lens):
        table = blocks[table_start[seq] : table_start[seq + 1]]
        offset = first_row[seq + 1] - length  # from a position to its row
        position = first_row[seq] - offset
        source = table[(position - 1) // block_size] if position else None
        branch, own = NO_BRANCH, length
        if branches is not None and branches[0, seq] != NO_BRANCH:
            branch, own = int(branches[0, seq]), position + int(branches[1, seq])
        for target, end in _stretches(table, position, own, block_size):
            runs.append(Run(slice(position + offset, end + offset), source, target))
            position, source = end, target
        if position < length:
            runs.append(Run(slice(position + offset, length + offset), source, branch))
    return runs


def _stretches(table: list[int], start: int, length: int, block_size: int) -> Iterator[tuple[int, int]]:
    """The distinct blocks of the positions from `start` to `length`, each with the end of its positions."""
    last = (length - 1) // block_size
    for index in range(start // block_size, last + 1):
        if index == last:
            yield table[index], length
        elif table[index] != table[index + 1]:
            yield table[index], (index + 1) * block_size


def _before(state: StatePart[Tensor], run: Run) -> Tensor:
    return torch.zeros_like(state.memory[0]) if run.source is None else state.memory[run.source].clone()


def causal_conv(
    x: Tensor, columns: ConvColumns, weight: ConvWeight[Tensor], state: StatePart[Tensor], batch: Batch
) -> Tensor:
    """See `CausalConv`."""
    taps = weight.taps

    def part(first: int) -> Tensor:
        return x[:, first : first + taps.shape[1]].float()

    values = part(columns.values)
    if columns.before is not None:
        values = values * part(columns.before)
    out = torch.empty_like(values)
    for run in batch.derived(plan_runs, state.block_size):
        # The state has the last tokens before the run.
        known = torch.cat((_before(state, run), values[run.rows]))
        count = run.rows.stop - run.rows.start
        total = torch.zeros_like(values[run.rows]) if weight.bias is None else weight.bias.expand(count, -1)
        for tap, factor in enumerate(taps):
            total = total + factor * known[tap : tap + count]
        out[run.rows] = total
        state.memory[run.target] = known[count:]
    if weight.activation == "silu":
        out = out * _sigmoid(out)
    if columns.after is not None:
        out = out * part(columns.after)
    return out.to(x.dtype)


def gated_delta_rule(
    qkv: Tensor,
    projected: Tensor,
    first_gate: int,
    shape: DeltaShape,
    gates: Gates[Tensor],
    state: StatePart[Tensor],
    batch: Batch,
) -> Tensor:
    """See `GatedDeltaRule`."""
    heads, keys = shape.value_heads, shape.key_heads * shape.key_dim
    query, key, value = _columns(qkv, keys, keys, heads * shape.value_dim)
    query, key = (_of_value_heads(_unit(_by_head(part, shape.key_heads)), shape) for part in (query, key))
    query, value = query * shape.key_dim**-0.5, _by_head(value, heads)
    steps = heads * shape.key_dim if shape.by_channel else heads
    rate, step = _columns(projected[:, first_gate:], heads, steps)
    step = _by_head(_softplus(step + gates.step_bias), heads)  # [rows, heads, key_dim or 1]
    rate, decay = _sigmoid(rate), torch.exp(-gates.log_decay.exp()[:, None] * step)
    out = torch.empty_like(value)
    for run in batch.derived(plan_runs, state.block_size):
        memory = _matrices(_before(state, run), shape.value_dim)
        for row in range(run.rows.start, run.rows.stop):
            memory = memory * decay[row, :, :, None]
            # The value that the state has for this key: only its difference to the new one is added.
            known = (memory * key[row, :, :, None]).sum(1)
            delta = (value[row] - known) * rate[row, :, None]
            memory = memory + key[row, :, :, None] * delta[:, None]
            out[row] = (memory * query[row, :, :, None]).sum(1)
        _store_matrices(state.memory[run.target], memory)
    return out.flatten(1).to(qkv.dtype)


def _of_value_heads(x: Tensor, shape: DeltaShape) -> Tensor:
    """[rows, key_heads, key_dim] -> [rows, value_heads, key_dim]."""
    share = shape.value_heads // shape.key_heads
    return x.repeat(1, share, 1) if shape.in_turn else x.repeat_interleave(share, 1)


def state_space_scan(
    xbc: Tensor,
    projected: Tensor,
    first_step: int,
    shape: ScanShape,
    gates: Gates[Tensor],
    skip: Tensor,
    state: StatePart[Tensor],
    batch: Batch,
) -> Tensor:
    """See `StateSpaceScan`."""
    inner, group = shape.heads * shape.head_dim, shape.groups * shape.state_size
    x, inputs, outputs = _columns(xbc, inner, group, group)
    inputs, outputs = (
        _by_head(part, shape.groups).repeat_interleave(shape.heads // shape.groups, 1) for part in (inputs, outputs)
    )
    x = _by_head(x, shape.heads)
    step = _softplus(projected[:, first_step : first_step + shape.heads].float() + gates.step_bias)
    step = step.clamp(shape.shortest_step, shape.longest_step)
    decay, scaled = torch.exp(_log_decay(step, gates)), x * step[:, :, None]
    out = x * skip[:, None]
    for run in batch.derived(plan_runs, state.block_size):
        memory = _matrices(_before(state, run), shape.head_dim)
        for row in range(run.rows.start, run.rows.stop):
            memory = memory * decay[row, :, None, None] + inputs[row, :, :, None] * scaled[row, :, None]
            out[row] += (memory * outputs[row, :, :, None]).sum(1)
        _store_matrices(state.memory[run.target], memory)
    return out.flatten(1).to(xbc.dtype)


def selective_scan(
    x: Tensor,
    steps: Tensor,
    projected: Tensor,
    first_input: int,
    gates: Gates[Tensor],
    skip: Tensor,
    state: StatePart[Tensor],
    batch: Batch,
) -> Tensor:
    """See `SelectiveScan`."""
    channels, size = gates.log_decay.shape
    inputs, outputs = _columns(projected[:, first_input:], size, size)
    (wide,), (step,) = _columns(x, channels), _columns(steps, channels)
    step = _softplus(step + gates.step_bias)
    speed, scaled = gates.log_decay.exp().T, wide * step
    out = wide * skip
    for run in batch.derived(plan_runs, state.block_size):
        memory = _matrices(_before(state, run), channels)[0]
        for row in range(run.rows.start, run.rows.stop):
            memory = memory * torch.exp(-speed * step[row]) + inputs[row, :, None] * scaled[row]
            out[row] += (memory * outputs[row, :, None]).sum(0)
        _store_matrices(state.memory[run.target], memory[None])
    return out.to(x.dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, first_gate: int, weight: Tensor, eps: float, group: int, *, gate_first: bool
) -> Tensor:
    """See `GatedRMSNorm`."""
    wide, factor = x.float(), gate[:, first_gate : first_gate + x.shape[1]].float()
    factor = factor * _sigmoid(factor)
    if gate_first:
        wide = wide * factor
    groups = _by_head(wide, x.shape[1] // group)
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normed = normed.flatten(1) * weight.float().repeat(x.shape[1] // len(weight))
    return (normed if gate_first else normed * factor).to(x.dtype)


def _columns(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split the first columns into parts of these sizes, as float32."""
    return torch.split(x[:, : sum(sizes)].float(), list(sizes), 1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.reshape(len(x), heads, x.shape[1] // heads)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add(1).reciprocal()


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _unit(x: Tensor) -> Tensor:
    """Normalize to length 1 along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _log_decay(step: Tensor, gates: Gates[Tensor]) -> Tensor:
    log_decay: Tensor = gates.log_decay
    return -log_decay.exp() * step


def _matrices(part: Tensor, columns: int) -> Tensor:
    """[heads, slices, rows, SLICE] -> [heads, rows, columns]."""
    return part.transpose(1, 2).flatten(2)[..., :columns]


def _store_matrices(part: Tensor, matrices: Tensor) -> None:
    """The inverse of `_matrices`: write the matrices to the state `part`."""
    heads, slices, rows, columns = part.shape
    padded = F.pad(matrices, (0, slices * columns - matrices.shape[2]))
    part.copy_(padded.view(heads, rows, slices, columns).transpose(1, 2))
