"""Mixtures of experts: the native ones against the reference, and their bits against themselves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock import native
from penstock.config.feed_forward import Routing
from penstock.config.weight_formats import FLOAT, FORMATS, WeightFormat
from penstock.kernels.arrays import array_of
from penstock.kernels.experts import Experts
from penstock.kernels.experts.native import PackedExperts
from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.linear.weight import LinearMap, Weight
from penstock.kernels.lora import ExpertUpdates, LoraMap
from penstock.kernels.lora.rows import AdapterRows
from penstock.kernels.ops import Ops
from penstock.native.array import dtype_name, dtype_of
from penstock.native.program import Program
from tests.kernels.versions import LIBRARY, REFERENCE, VERSIONS, native_table, needs_native
from tests.kernels.weights import random_integers

CPU = torch.device("cpu")
KINDS = [
    (FLOAT, torch.float32),
    (FLOAT, torch.bfloat16),
    *((FORMATS[name], torch.bfloat16) for name in ("int4", "q4_k", "q6_k", "mxfp4")),
]
kinds = pytest.mark.parametrize(("format", "dtype"), KINDS, ids=lambda part: getattr(part, "name", str(part)))
HIDDEN, INNER, OUT = 130, 72, 90


def filled(
    ops: Ops, rows: int, columns: int, format: WeightFormat, dtype: torch.dtype, seed: int, **options: Any
) -> Weight:
    weight = ops.new_weight(rows, columns, format, dtype=dtype, device=CPU, **{"gated": False, **options})
    if format is FLOAT:
        generator = torch.Generator().manual_seed(seed)
        weight.load(0, array_of((torch.randn(rows, columns, generator=generator) * 0.2).to(dtype)))
    else:
        weight.load(0, random_integers(rows, columns, format, seed))
    return weight


def mixture(
    ops: Ops,
    experts: int,
    format: WeightFormat,
    dtype: torch.dtype,
    *,
    biased: bool = False,
    apart: Sequence[int] = (),
    others: tuple[WeightFormat, ...] = (),
) -> Experts:
    """With gate and up `apart` in some experts, in formats of their own; the last experts are in formats `others`."""
    gate_up: list[LinearMap] = []
    formats = [format] * (experts - len(others)) + list(others)
    for seed, format in enumerate(formats):
        if seed in apart:
            both = [(format, 2 * seed), (FORMATS["q8_0"], 2 * seed + 1)]
            parts = [filled(ops, INNER, HIDDEN, each, dtype, place) for each, place in both]
            gate_up.append(JoinedWeight(parts, "silu", ops.empty_rows))
        else:
            gate_up.append(filled(ops, 2 * INNER, HIDDEN, format, dtype, seed, gated=True))
    down = [filled(ops, OUT, INNER, format, dtype, 100 + seed) for seed, format in enumerate(formats)]
    biases: list[Tensor | None] = [None, None]
    if biased:
        made = (torch.linspace(-1, 1, experts * rows).view(experts, rows) for rows in (2 * INNER, OUT))
        biases = [each.to(getattr(torch, dtype_name(down[0].bias_dtype))) for each in made]
    return ops.new_experts(gate_up, down, *biases)


def step(tokens: int, experts: int, top_k: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, experts, weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    logits = torch.randn(tokens, experts, generator=generator)
    ids, weights = REFERENCE.route(logits, Routing(experts, top_k), None)
    return x, ids, weights


@needs_native
@kinds
@settings(deadline=None, max_examples=5)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 4),
    biased=st.booleans(),
    shared=st.sampled_from([None, "plain", "gated"]),
    scale_x=st.booleans(),
)
def test_the_native_mixture_is_the_reference(
    format: WeightFormat,
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    top_k: int,
    biased: bool,
    shared: str | None,
    scale_x: bool,
) -> None:
    x, ids, weights = step(tokens, experts, min(top_k, experts), dtype)
    beside = None if shared is None else torch.randn(tokens, OUT).to(dtype)
    gate = torch.randn(tokens, 1) if shared == "gated" else None
    wanted, found = (
        mixture(ops, experts, format, dtype, biased=biased).mix(x, ids, weights, beside, gate, scale_x=scale_x)
        for ops in (REFERENCE, native_table())
    )
    coarse = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, wanted, rtol=coarse, atol=coarse * float(wanted.abs().max() + 1))


@needs_native
@kinds
def test_experts_may_have_no_gate(format: WeightFormat, dtype: torch.dtype) -> None:
    x, ids, weights = step(23, 6, 2, dtype)
    found = []
    for ops in (REFERENCE, native_table()):
        up: list[LinearMap] = [filled(ops, INNER, HIDDEN, format, dtype, seed, activation="relu2") for seed in range(6)]
        down = [filled(ops, OUT, INNER, format, dtype, 100 + seed) for seed in range(6)]
        found.append(ops.new_experts(up, down, None, None).mix(x, ids, weights, None, None))
    coarse = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found[1], found[0], rtol=coarse, atol=coarse * float(found[0].abs().max() + 1))


@needs_native
@pytest.mark.parametrize("format", ["float", "q4_k", "q6_k"])
@pytest.mark.parametrize(
    ("apart", "others"), [(range(6), ()), ((), ("int4", "float")), ((0, 4), ("float", "q5_k")), ((3,), ())], ids=str
)
def test_gate_and_up_and_each_expert_may_be_kept_in_different_formats(
    format: str, apart: Sequence[int], others: Sequence[str]
) -> None:
    x, ids, weights = step(23, 6, 2, torch.float32)
    formats = tuple(FORMATS[name] for name in others)
    for biased in (False, True):
        options: Any = {"apart": apart, "others": formats, "biased": biased}
        wanted, made = (
            mixture(ops, 6, FORMATS[format], torch.float32, **options) for ops in (REFERENCE, native_table())
        )
        assert isinstance(made, PackedExperts)
        expected, found = (each.mix(x, ids, weights, None, None) for each in (wanted, made))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max() + 1))


@needs_native
@pytest.mark.skipif(LIBRARY is None or not LIBRARY.multiplies_bfloat16, reason="bfloat16 takes 16 bits here")
def test_an_expert_whose_weights_do_not_fit_in_12_bits_is_as_good_as_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-12, 4, (2 * INNER, HIDDEN), generator=generator)
    outs = []
    x, ids, weights = step(9, 3, 2, torch.bfloat16)
    for ops in (REFERENCE, native_table()):
        gate_up = [filled(ops, 2 * INNER, HIDDEN, FLOAT, torch.bfloat16, seed, gated=True) for seed in range(3)]
        unlike = sizes * torch.randn(2 * INNER, HIDDEN, generator=generator.manual_seed(1))
        gate_up[1].load(0, array_of(unlike.bfloat16()))
        down = [filled(ops, OUT, INNER, FLOAT, torch.bfloat16, seed) for seed in range(3)]
        outs.append(ops.new_experts(list(gate_up), down, None, None).mix(x, ids, weights, None, None))
    assert "cannot be compressed to 12 bits" in caplog.text
    torch.testing.assert_close(outs[1], outs[0], rtol=3e-2, atol=3e-2 * float(outs[0].abs().max() + 1))


@needs_native
@kinds
@pytest.mark.parametrize("scale_x", [False, True])
def test_a_token_is_the_same_bits_in_any_company(format: WeightFormat, dtype: torch.dtype, scale_x: bool) -> None:
    tokens, experts = 300, 5  # more tokens than are computed at one time
    made = mixture(native_table(), experts, format, dtype, biased=True)
    x, ids, weights = step(tokens, experts, 2, dtype)
    beside = torch.randn(tokens, OUT).to(dtype)

    def mixed(first: int, last: int) -> Tensor:
        rows = slice(first, last)
        return made.mix(x[rows], ids[rows], weights[rows], beside[rows], None, scale_x=scale_x)

    alone = torch.cat([mixed(token, token + 1) for token in range(tokens)])
    threads = native.num_threads()
    try:
        for count in (1, 2, 3):
            native.set_num_threads(count)
            for first, last in ((0, tokens), (3, 260), (7, 9), (11, 50)):
                assert torch.equal(mixed(first, last), alone[first:last])
    finally:
        native.set_num_threads(threads)


@pytest.mark.parametrize("ops", VERSIONS)
def test_a_token_that_is_not_finite_spoils_its_own_row_alone(ops: Ops) -> None:
    made = mixture(ops, 4, FORMATS["int4"], torch.float32)
    x, ids, weights = step(9, 4, 2, torch.float32)
    clean = made.mix(x, ids, weights, None, None)
    x[4, 30] = torch.nan
    spoiled = made.mix(x, ids, weights, None, None)
    assert not spoiled[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoiled[others], clean[others])


@needs_native
def test_a_recorded_mixture_computes_what_its_calls_do() -> None:
    ops, routing = native_table(), Routing(6, 2, renormalize=True)
    made = mixture(ops, 6, FORMATS["int4"], torch.float32)
    router = filled(ops, 6, HIDDEN, FLOAT, torch.float32, 7)
    beside = filled(ops, OUT, HIDDEN, FLOAT, torch.float32, 8)

    def layer(x: Tensor) -> Tensor:
        ids, weights = ops.route(router.linear(x, None, torch.float32), routing, None)
        return made.mix(x, ids, weights, beside.linear(x, None, torch.float32), None)

    program = Program(20)
    first = program.array((HIDDEN,), dtype_of("float32"))
    y = layer(first)
    assert LIBRARY is not None
    assert y.program is program
    for count in (20, 1, 7):
        x = torch.randn(count, HIDDEN)
        first.fill(x, count)
        LIBRARY.run(program.segment(count))
        assert torch.equal(torch.from_numpy(y.memory.numpy())[:count], layer(x))


def updates(ops: Ops, experts: int, dtype: torch.dtype, slots: Sequence[int]) -> ExpertUpdates:
    """Adapters in slots 0 and 3, the second with DoRA, of some experts' maps; and the tokens' slots."""
    random = torch.Generator().manual_seed(8)
    rows = AdapterRows()
    rows.assign(np.array(slots, np.int32))
    tables = []
    for width, columns in ((2 * INNER, HIDDEN), (OUT, INNER)):
        of_experts = ops.new_expert_lora(experts, width, columns, dtype, CPU)
        for expert, table in enumerate(of_experts):
            for slot, rank in ((0, 5), (3, 18)):
                a, b = (torch.randn(rank, n, generator=random).to(dtype) / 9 for n in (columns, width // 2))
                factors = torch.rand(width // 2, generator=random).numpy() + 0.5
                if expert != slot + 1:
                    table.put(slot, [LoraMap(width // 4, width // 2, 0.5, a, b, factors if slot else None)])
        tables.append(of_experts)
    return ExpertUpdates(rows, *tables)


@needs_native
@pytest.mark.parametrize("scale_x", [False, True])
@pytest.mark.parametrize("apart", [(), (1, 2)])
def test_the_native_mixture_with_adapters_is_the_reference(apart: Sequence[int], scale_x: bool) -> None:
    x, ids, weights = step(20, 6, 3, torch.float32)
    slots = [0, -1, 3, 3, -1, 0, 0, 3, -1, -1] * 2
    wanted, plain, found = (
        mixture(ops, 6, FLOAT, torch.float32, biased=True, apart=apart).mix(
            x, ids, weights, None, None, scale_x=scale_x, updates=made(ops)
        )
        for ops, made in (
            (REFERENCE, lambda ops: updates(ops, 6, torch.float32, slots)),
            (native_table(), lambda ops: None),
            (native_table(), lambda ops: updates(ops, 6, torch.float32, slots)),
        )
    )
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    without = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(found[without], plain[without])
    assert not torch.equal(found, plain)


@needs_native
@kinds
@pytest.mark.parametrize("threads", [1, 3])
def test_a_tokens_bits_with_an_adapter_do_not_depend_on_the_others(
    format: WeightFormat, dtype: torch.dtype, threads: int
) -> None:
    before = native.num_threads()
    native.set_num_threads(threads)
    try:
        ops = native_table()
        made, (x, ids, weights) = mixture(ops, 6, format, dtype), step(33, 6, 3, dtype)
        slots = [[0, -1, 3, 3][token % 4] for token in range(33)]
        together = made.mix(x, ids, weights, None, None, updates=updates(ops, 6, dtype, slots))
        for token in (0, 1, 2, 31):
            one = slice(token, token + 1)
            alone = updates(ops, 6, dtype, slots[one])
            assert torch.equal(made.mix(x[one], ids[one], weights[one], None, None, updates=alone), together[one])
    finally:
        native.set_num_threads(before)
