"""Tensors of the model in both tables: numpy's arrays hold what torch's tensors do."""

import itertools

import numpy as np
import pytest
import torch

from penstock.kernels import memory, reference_memory
from penstock.kernels.arrays import array_of
from penstock.native.array import dtype_of
from penstock.system.allocator import Allocator

FLOATS = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(("given", "kept"), list(itertools.product((*FLOATS, "float8_e4m3fn"), FLOATS)))
def test_rows_are_converted_to_the_same_bits(given: str, kept: str) -> None:
    numbers = torch.cat(
        (torch.randn(300) * 10.0 ** torch.linspace(-9, 9, 300), torch.tensor([torch.nan, torch.inf, -0.0]))
    )
    rows = array_of(numbers.view(3, 101).to(getattr(torch, given)))
    tensor, array = torch.zeros(5, 101, dtype=getattr(torch, kept)), np.zeros((5, 101), dtype_of(kept))
    reference_memory.store(tensor, 1, rows)
    memory.store(memory.constant(array, None, "cpu"), 1, rows)
    wanted = array_of(tensor)
    same = (array.view(np.uint8) == wanted.view(np.uint8)).reshape(5, 101, -1).all(-1)
    assert (same | np.isnan(wanted.astype(np.float32)) & np.isnan(array.astype(np.float32))).all()


@pytest.mark.parametrize("size", [7, 2**15])
def test_a_stored_tensor_is_adopted_and_one_of_another_kind_is_not(size: int) -> None:
    made = memory.new_array((2, size), dtype_of("bfloat16"), "cpu", allocator=Allocator())
    memory.store(made.tensor, 0, np.ones((2, size), np.float32))
    packed = made.packed()
    found = memory.new_array((2, size), dtype_of("bfloat16"), "cpu", packed, allocator=Allocator())
    assert found.is_filled
    assert (found.tensor.numpy() == 1).all()
    other = memory.new_array((2, size), dtype_of("float16"), "cpu", packed, allocator=Allocator())
    assert not other.is_filled
    assert not other.adopt(packed)
    place = made.tensor
    assert made.adopt(found.packed())
    assert place.data_ptr() == found.tensor.data_ptr()
    expected = reference_memory.new_tensor((2, size), torch.bfloat16, "cpu", packed, allocator=Allocator())
    assert expected.is_filled
