import pytest
import torch

from penstock.runner.device_runner import is_device_lost


def test_what_torch_says_of_memory_is_fatal() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_device_lost(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError("no memory to sample from 151936 tokens"),
    ],
)
def test_a_broken_device_is_fatal(error: Exception) -> None:
    assert is_device_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("expected a CUDA tensor"),
        ValueError("CUDA error"),
        AssertionError("a block table ends before its sequence"),
        IndexError("list index out of range"),
    ],
)
def test_a_mistake_in_a_step_is_not(error: Exception) -> None:
    assert not is_device_lost(error)
