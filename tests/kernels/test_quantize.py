"""Both versions of the quantizers: never worse than plain rounding, as good as each other, strict about nonsense."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.kernels.quantize import GROUP, Int4, Int6, Int8
from tests.kernels.versions import REFERENCE, VERSIONS, native_table, needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows of all kinds: bell-shaped of different widths, one with an outlier, one of a single sign, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 1, rows).unsqueeze(1)
    weight[rows // 2, columns // 3] *= 40
    weight[rows // 3] = weight[rows // 3].abs() + 1
    weight[rows // 4] = 0
    return weight.to(dtype)


def errors(made: Int4 | Int6 | Int8, weight: Tensor) -> Tensor:
    """Of each row, the squared error."""
    return (made.dequantize().double() - weight.double()).square().sum(1)


def rounded_int8(weight: Tensor) -> Int8:
    """Plain rounding, to compare with."""
    scale = weight.float().abs().amax(1) / 127
    return Int8((weight.float() / scale.clamp_min(1e-30).unsqueeze(1)).round().to(torch.int8), scale)


def rounded_int6(weight: Tensor) -> Int6:
    rows, columns = weight.shape
    groups = torch.nn.functional.pad(weight.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    scale = (groups.abs().amax(-1) / 31).half().float()
    steps = (groups / scale.clamp_min(1e-30).unsqueeze(-1)).round().clamp(-31, 31)
    return Int6(steps.flatten(1)[:, :columns].to(torch.int8), scale)


def rounded_int4(weight: Tensor) -> Int4:
    rows, columns = weight.shape
    groups = torch.nn.functional.pad(weight.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale.clamp_min(1e-30)).round().clamp(0, 15)
    steps = (groups / scale.clamp_min(1e-30).unsqueeze(-1)).round() + zero.unsqueeze(-1)
    return Int4(steps.clamp(0, 15).flatten(1)[:, :columns].to(torch.uint8), scale, zero.to(torch.uint8))


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bits_are_never_worse_than_plain_rounding(ops: Ops, dtype: torch.dtype) -> None:
    weight = random_weight(12, 200, dtype)
    made = ops.quantize_int8(weight)
    assert (made.q.dtype, made.q.shape, made.scale.dtype, made.scale.shape) == (
        torch.int8,
        (12, 200),
        torch.float32,
        (12,),
    )
    assert made.q.min() >= -127
    assert (errors(made, weight) <= errors(rounded_int8(weight), weight) * (1 + 1e-5)).all()


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [GROUP, 2 * GROUP + 40])
def test_4_bits_are_never_worse_than_plain_rounding_and_better_on_the_whole(
    ops: Ops, dtype: torch.dtype, columns: int
) -> None:
    weight = random_weight(12, columns, dtype)
    made = ops.quantize_int4(weight)
    groups = -(-columns // GROUP)
    assert (made.q.dtype, made.q.shape, made.scale.dtype, made.zero.dtype) == (
        torch.uint8,
        (12, columns),
        torch.float32,
        torch.uint8,
    )
    assert made.scale.shape == made.zero.shape == (12, groups)
    assert made.q.max() <= 15
    assert made.zero.max() <= 15
    assert torch.equal(made.scale.half().float(), made.scale), "the kernels keep scales as float16"
    plain = errors(rounded_int4(weight), weight)
    assert (errors(made, weight) <= plain * (1 + 1e-5)).all()
    assert errors(made, weight).sum() < 0.95 * plain.sum()


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [GROUP, 2 * GROUP + 40])
def test_6_bits_are_never_worse_than_plain_rounding_and_better_than_4(
    ops: Ops, dtype: torch.dtype, columns: int
) -> None:
    weight = random_weight(12, columns, dtype)
    made = ops.quantize_int6(weight)
    assert (made.q.dtype, made.q.shape, made.scale.dtype) == (torch.int8, (12, columns), torch.float32)
    assert made.scale.shape == (12, -(-columns // GROUP))
    assert made.q.abs().max() <= 31
    assert torch.equal(made.scale.half().float(), made.scale), "the kernels keep scales as float16"
    assert (errors(made, weight) <= errors(rounded_int6(weight), weight) * (1 + 1e-5)).all()
    assert errors(made, weight).sum() < 0.1 * errors(ops.quantize_int4(weight), weight).sum()


@pytest.mark.parametrize("ops", VERSIONS)
def test_zeros_stay_zeros(ops: Ops) -> None:
    weight = random_weight(8, 130)
    for made in (ops.quantize_int8(weight), ops.quantize_int6(weight), ops.quantize_int4(weight)):
        assert not made.dequantize()[2].any()


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.3e38])
@pytest.mark.parametrize("place", [(0, 0), (5, 129)])
def test_what_is_no_weight_is_refused(ops: Ops, bad: float, place: tuple[int, int]) -> None:
    weight = random_weight(8, 130)
    weight[place] = bad
    assert ops.quantize_int8(weight) is None
    assert ops.quantize_int6(weight) is None
    assert ops.quantize_int4(weight) is None


@needs_native
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 400),
    dtype=st.sampled_from(DTYPES),
    magnitude=st.sampled_from([1e-6, 1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_the_native_version_is_as_good_as_the_reference(
    rows: int, columns: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    weight = (random_weight(rows, columns, seed=seed) * magnitude).to(dtype)
    for name in ("quantize_int8", "quantize_int6", "quantize_int4"):
        ours, truth = getattr(native_table(), name)(weight), getattr(REFERENCE, name)(weight)
        torch.testing.assert_close(errors(ours, weight), errors(truth, weight), rtol=1e-4, atol=0.0)


@needs_native
def test_rows_that_are_not_contiguous_are_read_right() -> None:
    weight = random_weight(40, 300).T
    assert torch.equal(native_table().quantize_int4(weight).q, native_table().quantize_int4(weight.contiguous()).q)
