"""Both versions of the rounding: the same bits, no worse than plain rounding, strict about nonsense."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.config.weight_formats import FORMATS, WeightFormat
from penstock.kernels.arrays import array_of, tensor_of
from penstock.kernels.linear.quantized import Quantized, dequantize
from penstock.kernels.ops import Ops
from tests.kernels.versions import REFERENCE, VERSIONS, native_table, needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDED = ["int8", "int6", "int5", "int4"]


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows of all kinds: bell-shaped of different widths, one with an outlier, one of a single sign, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 1, rows).unsqueeze(1)
    weight[rows // 2, columns // 3] *= 40
    weight[rows // 3] = weight[rows // 3].abs() + 1
    weight[rows // 4] = 0
    return weight.to(dtype)


def rounded(ops: Ops, weight: Tensor, name: str) -> Quantized:
    made = ops.quantize(array_of(weight), FORMATS[name])
    assert made is not None
    return made


def errors(made: Quantized, weight: Tensor, format: WeightFormat) -> Tensor:
    """Of each row, the squared error."""
    return (tensor_of(dequantize(made, format)).double() - weight.double()).square().sum(1)


def plain_errors(weight: Tensor, format: WeightFormat) -> Tensor:
    """Of each row, the squared error of rounding each group between its least and its largest, with float32 scales."""
    x = torch.nn.functional.pad(weight.double(), (0, -weight.shape[1] % format.group)).view(
        len(weight), -1, format.group
    )
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    if format.offset == "centre":
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / (2**format.bits - 1)).clamp_min(1e-30)
    return (((x - low) / scale).round() * scale + low - x).square().sum((1, 2))


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("columns", [64, 200])
def test_rounding_fills_the_format_and_is_no_worse_than_plain_rounding_and_better_with_few_bits(
    ops: Ops, dtype: torch.dtype, name: str, columns: int
) -> None:
    format, weight = FORMATS[name], random_weight(40, columns, dtype)
    made, groups = rounded(ops, weight, name), format.num_groups(columns)
    assert made.super_scales is not None
    assert (made.values.shape, made.scales.shape, made.super_scales.shape) == ((40, columns), (40, groups), (40, 1))
    assert (made.values.dtype, made.scales.dtype, made.super_scales.dtype) == (np.uint8, np.uint8, np.float32)
    assert int(made.values.max()) < 2**format.bits
    assert (made.offsets is None) == (format.offset == "centre")
    assert made.offsets is None or (made.offsets.shape == (40, groups) and made.offsets.max() <= 127)
    usual = torch.ones(40, dtype=torch.bool)
    usual[[10, 13, 20]] = False  # of zeros, of a single sign, with an outlier: scales of 8 bits are coarse there
    shares = (errors(made, weight, format) / plain_errors(weight, format))[usual]
    assert shares.mean() < {"int8": 1.05, "int6": 1.05, "int5": 0.95, "int4": 0.9}[name]


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("name", ROUNDED)
def test_zeros_stay_zeros(ops: Ops, name: str) -> None:
    assert not dequantize(rounded(ops, random_weight(8, 130), name), FORMATS[name])[2].any()


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.3e38])
@pytest.mark.parametrize("place", [(0, 0), (5, 129)])
def test_what_is_no_weight_is_refused(ops: Ops, name: str, bad: float, place: tuple[int, int]) -> None:
    weight = random_weight(8, 130)
    weight[place] = bad
    assert ops.quantize(array_of(weight), FORMATS[name]) is None


@needs_native
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    magnitude=st.sampled_from([1e-38, 1e-6, 1e-3, 1.0, 30.0]),
    name=st.sampled_from(ROUNDED),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_the_native_version_gives_the_bits_of_the_reference(
    rows: int, columns: int, dtype: torch.dtype, magnitude: float, name: str, seed: int
) -> None:
    weight = (random_weight(rows, columns, seed=seed) * magnitude).to(dtype)
    ours, truth = rounded(native_table(), weight, name), rounded(REFERENCE, weight, name)
    for part in ("values", "scales", "offsets", "super_scales"):
        made, wanted = getattr(ours, part), getattr(truth, part)
        assert made is wanted is None or np.array_equal(made, wanted), part


@needs_native
def test_rows_that_are_not_contiguous_are_read_right() -> None:
    weight = random_weight(40, 300).T
    made, wanted = (rounded(native_table(), each, "int4") for each in (weight, weight.contiguous()))
    assert np.array_equal(made.values, wanted.values)
