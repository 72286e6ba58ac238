"""The native linear map against the reference, and its bits against itself."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock import native
from penstock.config.feed_forward import Activation
from penstock.config.weight_formats import FLOAT, FORMATS, WeightFormat
from penstock.kernels.arrays import array_of, tensor_of
from penstock.kernels.linear.joined import JoinedWeight
from penstock.kernels.linear.quantized import Quantized, dequantize
from penstock.kernels.linear.reference import TILE_ROWS, as_int8
from penstock.kernels.linear.weight import Weight
from penstock.kernels.reference_ops import reference_ops
from tests.kernels.versions import LIBRARY, REFERENCE, native_table, needs_native
from tests.kernels.weights import random_integers

CPU = torch.device("cpu")
INTEGERS = [format for format in FORMATS.values() if format is not FLOAT]
KINDS: list[tuple[WeightFormat, torch.dtype]] = [
    (FLOAT, torch.float32),
    (FLOAT, torch.bfloat16),
    (FLOAT, torch.float16),
    *((format, torch.bfloat16) for format in INTEGERS),
    (FORMATS["fp8"], torch.float32),
]
kinds = pytest.mark.parametrize(("format", "dtype"), KINDS, ids=lambda part: getattr(part, "name", str(part)))
multiplies_bfloat16 = pytest.mark.skipif(
    LIBRARY is None or not LIBRARY.multiplies_bfloat16,
    reason="bfloat16 weights are integers that share an exponent here",
)


def values(rows: int, columns: int, format: WeightFormat, seed: int) -> Tensor | Quantized:
    """Rows of a weight."""
    if format is FLOAT:
        rng = np.random.default_rng(seed)
        return torch.from_numpy(rng.standard_normal((rows, columns), np.float32) * 0.1).bfloat16()
    return random_integers(rows, columns, format, seed)


def rows_of(content: Tensor | Quantized) -> NDArray[Any] | Quantized:
    """What `load` takes."""
    return array_of(content) if isinstance(content, Tensor) else content


def fill(weight: Weight, content: Tensor | Quantized, cuts: list[int]) -> None:
    """Load `content` in pieces, the last first."""
    bounds = [0, *cuts, weight.rows]
    for first, last in reversed(list(pairwise(bounds))):
        weight.load(first, rows_of(content[first:last]))


def both(
    rows: int, columns: int, format: WeightFormat, dtype: torch.dtype, gated: bool, cuts: list[int]
) -> list[Weight]:
    made: list[Weight] = [
        REFERENCE.new_weight(rows, columns, format, gated=gated, dtype=dtype, device=CPU),
        native_table().new_weight(rows, columns, format, gated=gated, dtype=dtype, device=CPU),
    ]
    for weight in made:
        fill(weight, values(rows, columns, format, seed=rows), cuts)
    return made


def activations(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.random.default_rng(tokens).standard_normal((tokens, columns), np.float32)).to(dtype)


@needs_native
@kinds
@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 100),
    columns=st.integers(1, 300),
    tokens=st.integers(1, 40),
    gated=st.booleans(),
    biased=st.booleans(),
    cut=st.integers(0, 100),
)
def test_the_native_map_is_that_of_the_reference(
    format: WeightFormat, dtype: torch.dtype, rows: int, columns: int, tokens: int, gated: bool, biased: bool, cut: int
) -> None:
    rows *= 2 if gated else 1
    reference, packed = both(rows, columns, format, dtype, gated, [min(cut, rows)])
    x = activations(tokens, columns, dtype)
    bias = torch.linspace(-1, 1, rows) if biased else None
    wanted = reference.linear(x, None if bias is None else bias.to(reference.bias_dtype), torch.float32)
    out = packed.linear(x, bias, torch.float32)
    # The reference rounds to the model's dtype on its way, gate and up too; the columns' products may cancel.
    coarse = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out, wanted, rtol=coarse, atol=coarse * float(wanted.abs().max() + 1))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "gated"),
    [
        *((one, True) for one in ("silu", "gelu_tanh", "clamped_swiglu", "gelu")),
        *((one, False) for one in ("relu2", "gelu", "gelu_tanh", "silu")),
    ],
)
def test_activations_are_those_of_the_reference(activation: Activation, gated: bool, dtype: torch.dtype) -> None:
    x, content = 20 * activations(7, 100, dtype), values(90, 100, FLOAT, seed=3)
    outs = []
    for ops in (REFERENCE, native_table()):
        weight = ops.new_weight(90, 100, FLOAT, gated=gated, activation=activation, dtype=dtype, device=CPU)
        weight.load(0, rows_of(content))
        halves = [ops.new_weight(45, 100, FLOAT, gated=False, dtype=dtype, device=CPU) for _ in range(2)]
        for half, rows in zip(halves, (slice(45), slice(45, 90)), strict=True):
            half.load(0, rows_of(content[rows]))
        outs.append(weight.linear(x, None, torch.float32))
        if gated:
            outs.append(JoinedWeight(halves, activation, ops.empty_rows).linear(x, None, torch.float32))
    assert float(outs[0].abs().max()) > 50  # beyond the clamp, and where gates are not linear
    coarse = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=coarse, atol=coarse * float(outs[0].abs().max()))


@pytest.mark.skipif(
    LIBRARY is None or LIBRARY.instruction_set != "avx512_bf16", reason="vectors do not multiply bfloat16 here"
)
def test_products_of_bfloat16_are_summed_in_float32_the_second_of_each_pair_first() -> None:
    packed = both(70, 300, FLOAT, torch.bfloat16, False, [])[1]
    x, weight = activations(3, 300, torch.bfloat16), values(70, 300, FLOAT, seed=70)
    assert isinstance(weight, Tensor)
    total = torch.zeros(3, 70)
    for column in range(300):
        product = x[:, column ^ 1, None].double() * weight[:, column ^ 1].double()  # exact
        total = (total.double() + product).float()
    assert torch.equal(packed.linear(x, None, torch.float32), total)


@needs_native
@kinds
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_same_bits_in_any_company(format: WeightFormat, dtype: torch.dtype, gated: bool) -> None:
    packed = both(200, 330, format, dtype, gated, [])[1]
    x = activations(61, 330, dtype)
    alone = torch.cat([packed.linear(x[i : i + 1], None, torch.float32) for i in range(61)])
    threads = native.num_threads()
    try:
        for count in (1, 2, 3):
            native.set_num_threads(count)
            for first, last in ((0, 61), *((5, 5 + few) for few in range(1, 15))):  # few meet weights otherwise
                assert torch.equal(packed.linear(x[first:last], None, torch.float32), alone[first:last])
    finally:
        native.set_num_threads(threads)


@needs_native
def test_a_row_of_bfloat16_is_the_same_bits_in_any_company_where_products_are_subnormal() -> None:
    packed = native_table().new_weight(130, 520, FLOAT, gated=False, dtype=torch.bfloat16, device=CPU)
    weight = values(130, 520, FLOAT, seed=1)
    assert isinstance(weight, Tensor)
    packed.load(0, array_of(weight * 2.0**-70))
    x = activations(20, 520, torch.bfloat16) * 2.0**-54
    alone = torch.cat([packed.linear(row[None], None, torch.float32) for row in x])
    assert (alone != 0).float().mean() > 0
    assert torch.equal(packed.linear(x, None, torch.float32), alone)


@needs_native
@pytest.mark.parametrize("name", ["int8", "q8_0", "q6_k", "q4_k", "int4"])
def test_a_precise_map_rounds_activations_a_hundred_times_finer_and_a_row_is_the_same_bits_in_any_company(
    name: str,
) -> None:
    rows, columns, tokens, format = 150, 330, 25, FORMATS[name]
    x, content = activations(tokens, columns, torch.float32), random_integers(rows, columns, format)
    exact = x.double() @ tensor_of(dequantize(content, format)).double().T
    coarse, precise = (
        native_table().new_weight(rows, columns, format, gated=False, dtype=torch.float32, device=CPU, precise=precise)
        for precise in (False, True)
    )
    reference = REFERENCE.new_weight(rows, columns, format, gated=False, dtype=torch.float32, device=CPU, precise=True)
    for weight in (coarse, precise, reference):
        weight.load(0, content)
    out = precise.linear(x, None, torch.float32)
    assert (out - exact).abs().mean() < (coarse.linear(x, None, torch.float32) - exact).abs().mean() / 100
    torch.testing.assert_close(
        out, reference.linear(x, None, torch.float32), rtol=1e-5, atol=1e-5 * float(exact.abs().max())
    )
    alone = torch.cat([precise.linear(x[i : i + 1], None, torch.float32) for i in range(tokens)])
    for few in (*range(2, 15), tokens):
        assert torch.equal(precise.linear(x[:few], None, torch.float32), alone[:few])


@needs_native
@kinds
def test_a_lookup_gives_the_rows_of_the_weight(format: WeightFormat, dtype: torch.dtype) -> None:
    reference, packed = both(70, 130, format, dtype, False, [33])
    ids = torch.tensor([69, 0, 33, 33])
    torch.testing.assert_close(packed.lookup(ids), reference.lookup(ids), rtol=1e-2, atol=1e-4)


def bfloat16_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


@multiplies_bfloat16
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 300),
    gated=st.booleans(),
    outliers=st.floats(0, 0.02),
    cuts=st.lists(st.integers(0, 150), max_size=3),
    seed=st.integers(0, 1000),
)
@example(rows=123, columns=240, gated=True, outliers=0.0042, cuts=[72], seed=58)  # tiny ones where a table has room
@example(rows=236, columns=146, gated=False, outliers=0.015625, cuts=[], seed=0)  # -0 where 12 bits do not do
def test_every_bfloat16_weight_is_held_exactly(
    rows: int, columns: int, gated: bool, outliers: float, cuts: list[int], seed: int
) -> None:
    """But those too small to be normal, which the processor's products take as zeros."""
    rows *= 2 if gated else 1
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * 0.05).bfloat16()
    unlike = torch.rand(rows, columns, generator=generator) < outliers
    weight[unlike] = bfloat16_of(torch.randint(-(2**15), 2**15, (int(unlike.sum()),), generator=generator))
    packed = native_table().new_weight(rows, columns, FLOAT, gated=gated, dtype=torch.bfloat16, device=CPU)
    fill(packed, weight, sorted({min(cut, rows) for cut in cuts}))
    held = packed.lookup(torch.arange(rows))
    numbers = (weight.float().abs() >= torch.finfo(torch.bfloat16).tiny) | (weight == 0)
    assert torch.equal(held.isnan(), weight.isnan())
    assert torch.equal(held[numbers].view(torch.int16), weight[numbers].view(torch.int16))


@needs_native
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 300),
    tokens=st.integers(1, 40),
    gated=st.booleans(),
    cuts=st.lists(st.integers(0, 150), max_size=3),
    seed=st.integers(0, 1000),
)
def test_every_float16_weight_is_held_and_multiplied_exactly(
    rows: int, columns: int, tokens: int, gated: bool, cuts: list[int], seed: int
) -> None:
    rows *= 2 if gated else 1
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (rows, columns), generator=generator).to(torch.int16)
    packed = native_table().new_weight(rows, columns, FLOAT, gated=gated, dtype=torch.float16, device=CPU)
    fill(packed, bits.view(torch.float16), sorted({min(cut, rows) for cut in cuts}))
    assert torch.equal(
        packed.lookup(torch.arange(rows)).view(torch.int16)[~bits.view(torch.float16).isnan()],
        bits[~bits.view(torch.float16).isnan()],
    )

    weight = torch.randint(-2000, 2000, (rows, columns), generator=generator) * 2.0**-12
    x = torch.randint(-20, 20, (tokens, columns), generator=generator) * 2.0**-6  # float32 holds the sums
    plain = native_table().new_weight(rows, columns, FLOAT, gated=False, dtype=torch.float16, device=CPU)
    fill(plain, weight.half(), sorted({min(cut, rows) for cut in cuts}))
    assert torch.equal(plain.linear(x.half(), None, torch.float32).double(), x.double() @ weight.double().T)


@needs_native
def test_float16_weights_take_and_give_float32_beyond_their_own_range() -> None:
    weight, x = values(90, 100, FLOAT, seed=4), 1e6 * activations(7, 100, torch.float32)
    assert isinstance(weight, Tensor)
    for ops in (REFERENCE, native_table()):
        made = ops.new_weight(
            90, 100, FLOAT, gated=False, dtype=torch.float32, stored=torch.float16, device=torch.device("cpu")
        )
        made.load(0, array_of(weight.half()))
        assert made.nbytes < 2.1 * 128 * 100
        torch.testing.assert_close(
            made.linear(x, None, torch.float32), x @ weight.half().float().T, rtol=1e-5, atol=5.0
        )
        assert torch.equal(made.lookup(torch.arange(90)), weight.half().float())


@multiplies_bfloat16
def test_bfloat16_weights_take_12_bits_unless_they_are_too_unlike_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    alike = torch.randn(128, 256, generator=generator).bfloat16()
    # Of sizes from 2^-60 to 2^60, of which a block has sixteen at most.
    unlike = alike * 2.0 ** torch.randint(-60, 60, (128, 256), generator=generator)
    x = activations(61, 256, torch.bfloat16)
    for weight, most_bits in ((alike, 12.3), (unlike, 16)):
        packed = native_table().new_weight(128, 256, FLOAT, gated=False, dtype=torch.bfloat16, device=CPU)
        fill(packed, weight, [50])
        assert packed.nbytes * 8 <= most_bits * weight.numel()
        assert torch.equal(packed.lookup(torch.arange(128)), weight)
        out, wanted = packed.linear(x, None, torch.float32), x.float() @ weight.float().T
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
        assert torch.equal(packed.linear(x[7:9], None, torch.float32), out[7:9])


@needs_native
@kinds
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_spoils_its_own_row_alone(format: WeightFormat, dtype: torch.dtype, bad: float) -> None:
    packed = both(40, 200, format, dtype, False, [])[1]
    x = activations(9, 200, dtype)
    clean = packed.linear(x, None, torch.float32)
    x[4, 150] = bad
    spoiled = packed.linear(x, None, torch.float32)
    assert not spoiled[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoiled[others], clean[others])


@needs_native
def test_bfloat16_near_the_largest_of_its_block_is_held_exactly() -> None:
    rng = np.random.default_rng(0)
    magnitude = torch.from_numpy(2.0 ** rng.uniform(-4.9, 0, (32, 64))).bfloat16()
    magnitude[:, 0] = 1.0
    weight = torch.where(torch.from_numpy(rng.random((32, 64)) < 0.5), magnitude, -magnitude)
    packed = native_table().new_weight(32, 64, FLOAT, gated=False, dtype=torch.bfloat16, device=CPU)
    packed.load(0, array_of(weight))
    assert torch.equal(packed.lookup(torch.arange(32)), weight)


@needs_native
def test_a_zero_row_and_tiny_values_give_zeros() -> None:
    for format, dtype in KINDS:
        packed = both(40, 200, format, dtype, False, [])[1]
        for value in (0.0, 1e-38):
            out = packed.linear(torch.full((2, 200), value).to(dtype), None, torch.float32)
            assert out.abs().max() < 1e-30


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:  # no view
                self.bytes = max(self.bytes, tensor.nbytes)
        return made


@needs_native
@pytest.mark.parametrize("format", INTEGERS, ids=lambda format: format.name)
@settings(deadline=None, max_examples=10)
@given(rows=st.integers(1, 150), columns=st.integers(1, 600), gated=st.booleans(), cut=st.integers(0, 150))
def test_integers_are_held_exactly_and_in_the_bytes_that_are_planned(
    format: WeightFormat, rows: int, columns: int, gated: bool, cut: int
) -> None:
    rows *= 2 if gated else 1
    content = random_integers(rows, columns, format, seed=cut)
    packed = native_table().new_weight(rows, columns, format, gated=gated, dtype=torch.float32, device=CPU)
    fill(packed, content, [min(cut, rows)])
    assert torch.equal(packed.lookup(torch.arange(rows)), tensor_of(dequantize(content, format)))
    panels = -(-rows // 64) + (1 if gated and rows // 2 % 32 else 0)
    row_scales = 4 * 64 if format.has_row_scales else 0
    assert packed.nbytes <= format.packed_bytes(64 * panels, columns) + row_scales


@pytest.mark.parametrize("format", INTEGERS, ids=lambda format: format.name)
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_reference_dequantizes_a_part_of_the_weight_at_a_time_and_answers_the_same(
    format: WeightFormat, tokens: int
) -> None:
    rows, columns = 1300, 512
    weight = REFERENCE.new_weight(rows, columns, format, gated=False, dtype=torch.float32, device=CPU)
    fill(weight, values(rows, columns, format, seed=1), [])
    x = activations(tokens, columns, torch.float32)
    with LargestTensor() as largest:
        out = weight.linear(x, None, torch.float32)
    assert largest.bytes <= 4 * TILE_ROWS * columns
    whole = weight.lookup(torch.arange(rows))
    rounded = as_int8(x, format.x_group) if format.value == "integer" else x
    expected = torch.nn.functional.linear(rounded, whole)
    if tokens > 1:
        assert torch.equal(out, expected)
    else:  # MKL's sums for one row depend on the number of outputs, with several threads on Xeons
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("format", "stored"),
    [*((format, None) for format in INTEGERS), (FLOAT, torch.float16)],
    ids=lambda part: getattr(part, "name", str(part)),
)
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("tokens", [1, 9])
def test_widened_weights_are_the_same_and_are_not_converted_at_each_product(
    format: WeightFormat, stored: torch.dtype | None, precise: bool, tokens: int
) -> None:
    rows, columns = 600, 512
    plain, widened = (
        reference_ops(widened_weights=wide).new_weight(
            rows, columns, format, gated=False, dtype=torch.float32, stored=stored, device=CPU, precise=precise
        )
        for wide in (False, True)
    )
    for weight in (plain, widened):
        fill(weight, values(rows, columns, format, seed=1), [70])
    ids, x = torch.arange(rows), activations(tokens, columns, torch.float32)
    assert torch.equal(widened.lookup(ids), plain.lookup(ids))
    with LargestTensor() as largest:
        out = widened.linear(x, None, torch.float32)
    assert largest.bytes <= 8 * tokens * rows
    torch.testing.assert_close(out, plain.linear(x, None, torch.float32), rtol=1e-6, atol=1e-5)
    assert widened.nbytes == 4 * rows * columns
