"""Operations of recurrent layers: against transformers, in any division of the texts, and version by version."""

import hashlib
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from penstock.config.state_layout import matrix_state
from penstock.kernels.arrays import array_of, tensor_of
from penstock.kernels.batch import Batch, RecordedBatch
from penstock.kernels.ops import Ops
from penstock.kernels.recurrent import ConvColumns, ConvWeight, DeltaShape, Gates, ScanShape
from penstock.kernels.recurrent.reference import plan_runs
from penstock.kernels.recurrent.states import StateCache, StatePart, StateShape
from penstock.native.array import NoNativeKernelError, dtype_of
from penstock.native.program import Program
from tests.kernels.paged import Part, random_division
from tests.kernels.versions import LIBRARY, REFERENCE, VERSIONS, native_table, needs_native

BLOCK_SIZE = 4
CPU = torch.device("cpu")
Compute = Callable[[Ops, Tensor, StatePart, Batch], Tensor]
"""(operation's table, rows, state, batch) -> result"""


@dataclass(frozen=True)
class Mixer:
    """An operation with its parameters: the columns it takes, its state, and the call."""

    columns: int
    part: tuple[int, ...]
    compute: Compute


def conv_mixer(channels: int, kernel: int, *, bias: bool, silu: bool, factors: bool, seed: int = 0) -> Mixer:
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(kernel, channels, generator=generator)
    weight = ConvWeight(taps, torch.randn(channels, generator=generator) if bias else None, "silu" if silu else None)
    columns = ConvColumns(2 * channels + 3, 0, channels) if factors else ConvColumns(1)
    return Mixer(
        columns.values + channels + 2,
        (kernel - 1, channels),
        lambda ops, x, state, batch: ops.causal_conv(x, columns, weight, state, batch),
    )


def delta_mixer(shape: DeltaShape, seed: int = 0) -> Mixer:
    generator = torch.Generator().manual_seed(seed)
    heads = shape.value_heads
    steps = heads * shape.key_dim if shape.by_channel else heads
    gates = Gates(torch.rand(heads, generator=generator) * 2 - 1, torch.randn(steps, generator=generator))
    qkv = 2 * shape.key_heads * shape.key_dim + heads * shape.value_dim
    return Mixer(
        qkv + heads + steps,
        matrix_state(heads, shape.key_dim, shape.value_dim),
        lambda ops, x, state, batch: ops.gated_delta_rule(x, x, qkv, shape, gates, state, batch),
    )


def scan_mixer(shape: ScanShape, seed: int = 0) -> Mixer:
    generator = torch.Generator().manual_seed(seed)
    heads = shape.heads
    gates = Gates(torch.rand(heads, generator=generator) * 2 - 1, torch.randn(heads, generator=generator))
    skip = torch.randn(heads, generator=generator)
    xbc = heads * shape.head_dim + 2 * shape.groups * shape.state_size
    return Mixer(
        xbc + heads,
        matrix_state(heads, shape.state_size, shape.head_dim),
        lambda ops, x, state, batch: ops.state_space_scan(x, x, xbc, shape, gates, skip, state, batch),
    )


def selective_mixer(channels: int, state_size: int, seed: int = 0) -> Mixer:
    generator = torch.Generator().manual_seed(seed)
    gates = Gates(
        torch.rand(channels, state_size, generator=generator) * 2 - 1, torch.randn(channels, generator=generator)
    )
    skip = torch.randn(channels, generator=generator)
    return Mixer(
        channels + 2 * state_size + 3,
        matrix_state(1, state_size, channels),
        lambda ops, x, state, batch: ops.selective_scan(x, x, x, channels, gates, skip, state, batch),
    )


MIXERS = {
    "conv": conv_mixer(37, 4, bias=False, silu=True, factors=False),
    "wide conv": conv_mixer(530, 4, bias=True, silu=True, factors=False),
    "gated conv": conv_mixer(48, 3, bias=True, silu=False, factors=True),
    "delta": delta_mixer(DeltaShape(2, 4, 16, 24)),
    "delta, keys in turn": delta_mixer(DeltaShape(2, 6, 16, 24, in_turn=True)),
    "delta of odd sizes": delta_mixer(DeltaShape(3, 3, 7, 37)),
    "delta by channel": delta_mixer(DeltaShape(2, 2, 16, 24, by_channel=True)),
    "delta by channel, of odd sizes": delta_mixer(DeltaShape(3, 3, 7, 37, by_channel=True)),
    "delta of real sizes": delta_mixer(DeltaShape(1, 1, 128, 128)),
    "scan": scan_mixer(ScanShape(4, 16, 2, 24, 0.0, float("inf"))),
    "scan of odd sizes": scan_mixer(ScanShape(3, 37, 1, 7, 0.3, 0.9)),
    "scan of real sizes": scan_mixer(ScanShape(2, 64, 1, 128, 0.001, float("inf"))),
    "selective scan": selective_mixer(64, 16),
    "selective scan of odd sizes": selective_mixer(41, 7),
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)


class Texts:
    """Texts of the given lengths, whose states lie in random blocks among rubbish.

    `kept`: the first token of every so many blocks gets a block of its own, so that the state before it stays.
    """

    def __init__(self, mixer: Mixer, ops: Ops, lengths: list[int], dtype: torch.dtype, kept: int = 2) -> None:
        generator = torch.Generator().manual_seed(1)
        self.mixer, self.ops = mixer, ops
        self.rows = [torch.randn(length, mixer.columns, generator=generator).to(dtype) for length in lengths]
        spans = [-(-length // BLOCK_SIZE) for length in lengths]
        blocks = random.Random(2).sample(range(sum(spans) + 3), sum(spans) + 3)
        self.tables = []
        for span in spans:
            own = [blocks.pop() for _ in range(-(-span // kept))]
            self.tables.append([own[place // kept] for place in range(span)])
        shape = StateShape(2, sum(spans) + 3, BLOCK_SIZE, ((3,), mixer.part), CPU)
        self.cache: StateCache = ops.new_states(shape).layers[1]
        self.state = self.cache.parts[1]
        self.state.memory.fill_(float("nan"))

    def compute(self, parts: list[Part], branches: list[tuple[int, int]] | None = None) -> list[Tensor]:
        rows = torch.cat([self.rows[seq][start : start + count] for seq, start, count in parts])
        out = self.mixer.compute(self.ops, rows, self.state, self.batch(parts, branches))
        return list(out.split([count for _, _, count in parts]))

    def batch(self, parts: list[Part], branches: list[tuple[int, int]] | None = None) -> Batch:
        starts, counts = [start for _, start, _ in parts], [count for _, _, count in parts]
        tables, ids = [array("i", self.tables[seq]) for seq, _, _ in parts], array("i", [0] * sum(counts))
        memory, pool_blocks = self.ops.lay_out(counts, starts, tables, ids, BLOCK_SIZE)
        columns = None if branches is None else np.ascontiguousarray(np.array(branches, np.int32).T)
        return Batch(memory, len(parts), sum(counts), pool_blocks, CPU, columns)

    def whole(self) -> list[Tensor]:
        return [self.compute([(seq, 0, len(rows))])[0] for seq, rows in enumerate(self.rows)]

    def in_steps(self, steps: list[list[Part]]) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in self.rows]
        for parts in steps:
            for (seq, _, _), out in zip(parts, self.compute(parts), strict=True):
                found[seq].append(out)
        return [torch.cat(outs) for outs in found]

    def states(self) -> Tensor:
        """Of all the texts' blocks, in order."""
        return self.state.memory[[block for table in self.tables for block in table]]


@pytest.mark.parametrize("ops", VERSIONS)
@every_mixer
def test_a_border_anywhere_changes_no_bit_of_result_or_states(mixer: Mixer, ops: Ops) -> None:
    texts = Texts(mixer, ops, [23], torch.float32)
    (expected,), states = texts.whole(), texts.states()
    assert expected.isfinite().all()
    for border in range(1, 23):
        texts.state.memory.fill_(float("nan"))
        (found,) = texts.in_steps([[(0, 0, border)], [(0, border, 23 - border)]])
        assert torch.equal(found, expected)
        assert torch.equal(texts.states(), states)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_mixer
def test_texts_in_any_company_and_division_get_the_same_bits(mixer: Mixer, ops: Ops, dtype: torch.dtype) -> None:
    lengths = [1, 40, 3, 18]
    texts = Texts(mixer, ops, lengths, dtype)
    expected, states = texts.whole(), texts.states()
    for seed in range(3):
        texts.state.memory.fill_(float("nan"))
        found = texts.in_steps(random_division(random.Random(seed), lengths))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(texts.states(), states)


@pytest.mark.parametrize("ops", VERSIONS)
@every_mixer
def test_another_text_goes_on_from_a_state_that_was_kept(mixer: Mixer, ops: Ops) -> None:
    texts = Texts(mixer, ops, [21], torch.float32)
    (expected,) = texts.whole()
    kept = texts.tables[0][1]
    before = texts.state.memory[kept].clone()
    texts.tables = [[*texts.tables[0][:2], *reversed(texts.tables[0][2:])]]
    (found,) = texts.compute([(0, 8, 13)])
    assert torch.equal(found, expected[8:])
    assert torch.equal(texts.state.memory[kept], before)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@every_mixer
def test_a_branch_takes_in_what_comes_after_some_tokens_whose_state_stays(mixer: Mixer, ops: Ops, after: int) -> None:
    texts = Texts(mixer, ops, [21, 9, 13], torch.float32)
    expected = texts.whole()
    last = texts.state.memory[texts.tables[0][-1]].clone()
    used = {block for table in texts.tables for block in table}
    branch, other, *_ = (block for block in range(len(texts.state.memory)) if block not in used)
    texts.compute([(0, 0, 13), (1, 0, 8), (2, 0, 6)])
    none = (-1, -1)
    found = texts.compute([(0, 13, 5), (1, 8, 1), (2, 6, 7)], [(branch, after), none, none])  # 13 to 18, over a border
    assert torch.equal(found[0], expected[0][13:18])
    assert torch.equal(found[1], expected[1][8:])
    assert torch.equal(found[2], expected[2][6:])
    goes_on = texts.compute([(0, 13 + after, 8 - after)])[0]
    assert torch.equal(goes_on, expected[0][13 + after :]), "the state after those tokens stayed"
    assert torch.equal(texts.state.memory[texts.tables[0][-1]], last)
    texts.tables[0] = [*texts.tables[0][:4], branch, branch]
    assert torch.equal(texts.compute([(0, 18, 3)], [(other, 1)])[0], expected[0][18:]), "and the branch goes on"
    assert torch.equal(texts.state.memory[other], last)


@every_mixer
def test_blocks_are_copied(mixer: Mixer) -> None:
    texts = Texts(mixer, REFERENCE, [9, 9], torch.float32)
    texts.whole()
    first, second = texts.tables[0][-1], texts.tables[1][-1]
    wanted = texts.state.memory[first].clone()
    texts.cache.copy_blocks([(first, second)])
    assert torch.equal(texts.state.memory[second], wanted)


def test_runs_begin_where_the_table_names_another_block() -> None:
    texts = Texts(MIXERS["conv"], REFERENCE, [20], torch.float32)
    texts.tables = [[7, 7, 3, 3, 9]]
    runs = [(run.rows.start, run.rows.stop, run.source, run.target) for run in plan_runs(texts.batch([(0, 9, 11)]), 4)]
    assert runs == [(0, 7, 3, 3), (7, 11, 3, 9)]
    runs = [(run.rows.start, run.rows.stop, run.source, run.target) for run in plan_runs(texts.batch([(0, 0, 16)]), 4)]
    assert runs == [(0, 8, None, 7), (8, 16, 7, 3)]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_mixer
def test_native_mixers_match_the_reference(mixer: Mixer, dtype: torch.dtype) -> None:
    lengths = [1, 40, 3, 18]
    expected, found = (Texts(mixer, ops, lengths, dtype).whole() for ops in (REFERENCE, native_table()))
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.01}
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), **tolerance)


@needs_native
@every_mixer
def test_a_program_computes_what_the_calls_do(mixer: Mixer) -> None:
    assert LIBRARY is not None
    texts = Texts(mixer, native_table(), [7, 30], torch.bfloat16)
    steps: list[list[Part]] = [[(0, 0, 5)], [(1, 0, 20), (0, 5, 1)], [(0, 6, 1), (1, 20, 10)]]
    expected = [torch.cat(texts.compute(parts)) for parts in steps]
    texts.state.memory.fill_(float("nan"))
    program, batch = Program(30), RecordedBatch()
    x = program.array((mixer.columns,), dtype_of("bfloat16"))
    out = mixer.compute(texts.ops, x, texts.state, batch)
    assert out.program is program
    for parts, wanted in zip(steps, expected, strict=True):
        rows = torch.cat([texts.rows[seq][start : start + count] for seq, start, count in parts])
        x.fill(array_of(rows), len(wanted))
        batch.become(texts.batch(parts))
        LIBRARY.run(program.segment(len(wanted)))
        assert torch.equal(tensor_of(out.memory.numpy())[: len(wanted)], wanted)


@needs_native
@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (conv_mixer(8, 17, bias=False, silu=True, factors=False), "over 17 tokens"),
        (delta_mixer(DeltaShape(1, 1, 513, 16)), "513 x 16"),
        (scan_mixer(ScanShape(1, 513, 1, 2, 0.0, 1.0)), "513 x 2"),
        (selective_mixer(2, 513), "states of 513"),
    ],
)
def test_sizes_beyond_the_kernels_limits_are_refused_by_name(mixer: Mixer, words: str) -> None:
    with pytest.raises(NoNativeKernelError, match=words):
        Texts(mixer, native_table(), [3], torch.float32).whole()


@needs_native
@every_mixer
def test_instruction_sets_agree_on_bits(mixer: Mixer) -> None:
    assert LIBRARY is not None
    digests, before = set(), LIBRARY.instruction_set
    try:
        for name in LIBRARY.built:
            if LIBRARY.choose(name):
                out = torch.cat(Texts(mixer, native_table(), [40, 3], torch.float32).whole())
                digests.add(hashlib.md5(out.numpy().tobytes()).hexdigest())
    finally:
        LIBRARY.choose(before)
    assert len(digests) == 1


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("silu", [False, True])
def test_the_convolution_is_that_of_transformers(silu: bool, ops: Ops) -> None:
    mixer = conv_mixer(37, 4, bias=True, silu=silu, factors=False, seed=5)
    generator = torch.Generator().manual_seed(5)
    taps, bias = torch.randn(4, 37, generator=generator), torch.randn(37, generator=generator)
    texts = Texts(mixer, ops, [19], torch.float32)
    x = texts.rows[0][:, 1:38].T[None]
    expected = qwen.causal_conv1d_fn(x, taps.T, bias, activation="silu" if silu else None)[0].T
    torch.testing.assert_close(texts.whole()[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("ops", VERSIONS)
def test_the_delta_rule_is_that_of_transformers(ops: Ops, in_turn: bool) -> None:
    shape = DeltaShape(2, 6, 16, 24, in_turn)
    keys = torch.arange(6) % 2 if in_turn else torch.arange(6) // 3
    mixer = delta_mixer(shape, seed=5)
    generator = torch.Generator().manual_seed(5)
    log_decay, bias = torch.rand(6, generator=generator) * 2 - 1, torch.randn(6, generator=generator)
    texts = Texts(mixer, ops, [33], torch.float32)
    query, key, value, rate, step = texts.rows[0].split((32, 32, 144, 6, 6), 1)
    expected, state = qwen.torch_recurrent_gated_delta_rule(
        query.view(1, 33, 2, 16)[:, :, keys],
        key.view(1, 33, 2, 16)[:, :, keys],
        value.view(1, 33, 6, 24),
        g=(-log_decay.exp() * F.softplus(step + bias))[None],
        beta=rate.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(texts.whole()[0], expected.flatten(2)[0], atol=2e-6, rtol=2e-5)
    kept = texts.state.memory[texts.tables[0][-1]]
    torch.testing.assert_close(kept[:, 0, :, :24], state[0], atol=2e-6, rtol=2e-5)
    assert not kept[..., 24:].any()


@pytest.mark.parametrize("ops", VERSIONS)
def test_the_scan_is_that_of_transformers(ops: Ops) -> None:
    shape = ScanShape(4, 16, 2, 24, 0.3, float("inf"))
    mixer = scan_mixer(shape, seed=5)
    generator = torch.Generator().manual_seed(5)
    log_decay, bias = torch.rand(4, generator=generator) * 2 - 1, torch.randn(4, generator=generator)
    skip = torch.randn(4, generator=generator)
    texts = Texts(mixer, ops, [33], torch.float32)
    x, inputs, outputs, step = texts.rows[0].split((64, 48, 48, 4), 1)
    expected, state = nemotron.mamba2_chunk_scan(
        x.view(1, 33, 4, 16),
        step[None],
        -log_decay.exp(),
        inputs.view(1, 33, 2, 24),
        outputs.view(1, 33, 2, 24),
        chunk_size=8,
        D=skip,
        dt_bias=bias,
        dt_softplus=True,
        dt_limit=(0.3, float("inf")),
        return_final_states=True,
    )
    torch.testing.assert_close(texts.whole()[0], expected.flatten(2)[0], atol=3e-5, rtol=3e-5)
    kept = texts.state.memory[texts.tables[0][-1]]
    torch.testing.assert_close(kept[:, 0, :, :16].transpose(1, 2), state[0], atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("step", [-100.0, -30.0, -3.0, 0.0, 1e-3, 5.0, 30.0, 1e4])
def test_a_time_step_is_exact_near_zero_and_far_from_it(step: float, ops: Ops) -> None:
    shape = ScanShape(1, 16, 1, 2, 0.0, float("inf"))
    gates = Gates(torch.full((1,), -200.0), torch.zeros(1))  # nothing is forgotten
    rows = torch.tensor([[1.0] * 16 + [1.0, 0.0, 1.0, 0.0, step]])
    state = ops.new_states(StateShape(1, 1, BLOCK_SIZE, (matrix_state(1, 2, 16),), CPU)).layers[0].parts[0]
    memory, _ = ops.lay_out([1], [0], [array("i", [0])], array("i", [0]), BLOCK_SIZE)
    out = ops.state_space_scan(rows, rows, 20, shape, gates, torch.zeros(1), state, Batch(memory, 1, 1, 1, CPU))
    expected = F.softplus(torch.tensor(step, dtype=torch.float64)).float().expand(1, 16)
    torch.testing.assert_close(out, expected, atol=1e-37, rtol=2e-6)


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "weights", "gate_first"), [(24, 24, False), (24, 72, True), (72, 72, True)])
def test_the_gated_norm_is_that_of_transformers(
    group: int, weights: int, gate_first: bool, dtype: torch.dtype, ops: Ops
) -> None:
    x, gate = torch.randn(5, 72).to(dtype), torch.randn(5, 80).to(dtype)
    weight = (torch.rand(weights) + 0.5).to(dtype)
    if gate_first:
        norm = nemotron.NemotronHRMSNormGated(72, group, eps=1e-5)
        norm.weight.data = weight
        expected = norm(x, gate[:, 3:75])
    else:
        norm = qwen.Qwen3NextRMSNormGated(24, eps=1e-5)
        norm.weight.data = weight
        expected = norm(x.view(15, 24), gate[:, 3:75].reshape(15, 24)).view(5, 72)
    alone = [
        ops.gated_rms_norm(x[i : i + 1].clone(), gate[i : i + 1], 3, weight, 1e-5, group, gate_first=gate_first)
        for i in range(5)
    ]
    found = ops.gated_rms_norm(x.clone(), gate, 3, weight, 1e-5, group, gate_first=gate_first)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected.to(dtype), atol=tolerance, rtol=tolerance)
    assert torch.equal(found, torch.cat(alone))
