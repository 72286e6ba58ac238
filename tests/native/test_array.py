from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.arrays import array_of
from penstock.native.array import Array, NoNativeKernelError, dtype_name, dtype_of


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8", "int64"])
def test_an_array_answers_as_a_tensor_over_the_same_memory(name: str) -> None:
    whole = torch.zeros(5, 3, 4, dtype=getattr(torch, name))
    for tensor in (whole, whole[1:3], whole[:, 1], whole[:0]):
        array = Array(array_of(tensor))
        assert array.data_ptr() == tensor.data_ptr() or not tensor.numel()
        assert (array.shape, len(array)) == (tuple(tensor.shape), len(tensor))
        assert [array.stride(axis) for axis in range(array.dim())] == list(tensor.stride())
        assert (array.is_contiguous(), array.dtype.itemsize) == (tensor.is_contiguous(), tensor.itemsize)
        assert array.dtype == dtype_of(name)
        assert dtype_name(array.dtype) == dtype_name(tensor.dtype) == name


def test_rows_and_views_share_the_memory() -> None:
    content = np.arange(12, dtype=np.float32).reshape(4, 3)
    array = Array(content)
    array[1:3].fill([[0, 0, 0]], 1)
    array.view(12)[9:].fill([7, 7, 7], 3)
    assert content.tolist() == [[0, 1, 2], [0, 0, 0], [6, 7, 8], [7, 7, 7]]


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("softmax", lambda x: x.softmax(-1)),
        ("softmax", lambda x: torch.softmax(x, -1)),
        ("multiplication|mul", lambda x: x * 2.0),
        ("mul", lambda x: torch.ones(3) * x),
    ],
)
def test_an_operation_outside_the_table_has_no_native_kernel_and_is_named(
    name: str, compute: Callable[[Any], object]
) -> None:
    with pytest.raises(NoNativeKernelError, match=name):
        compute(Array(np.ones(3, np.float32)))
