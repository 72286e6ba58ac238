"""Every type of GGUF that the kernels have a home for arrives there without loss, bit for bit as `gguf` reads it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.weight_formats import FORMATS
from penstock.kernels.arrays import tensor_of
from penstock.kernels.ops import Ops
from penstock.quantization.gguf_blocks import quantized_rows
from penstock.quantization.scheme import GGUF_FORMATS
from tests.kernels.versions import VERSIONS
from tests.quantization.gguf_rows import HALVES, dequantized, random_rows


@pytest.mark.parametrize("ops", VERSIONS)
@pytest.mark.parametrize("type", HALVES)
@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 80), blocks=st.integers(1, 5), gated=st.booleans(), seed=st.integers(0, 2**31))
def test_a_weight_gives_the_rows_that_the_file_holds(
    ops: Ops, type: str, rows: int, blocks: int, gated: bool, seed: int
) -> None:
    stored = random_rows(type, 2 * rows, blocks, seed)
    wanted = dequantized(type, stored)
    weight = ops.new_weight(
        2 * rows,
        wanted.shape[1],
        FORMATS[GGUF_FORMATS[type]],
        gated=gated,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    weight.load(rows, quantized_rows(type, stored[rows:]))
    weight.load(0, quantized_rows(type, stored[:rows]))
    assert torch.equal(weight.lookup(torch.arange(2 * rows)), tensor_of(wanted))


def test_all_quantized_types_that_have_a_home_are_tested() -> None:
    assert {type for type, format in GGUF_FORMATS.items() if format != "float"} == set(HALVES)
