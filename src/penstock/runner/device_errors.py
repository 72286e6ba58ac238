"""Errors after which a device, or this process, cannot be trusted to compute another step."""

import re

import torch

_TEXTS = re.compile(
    "(CUDA|CUDA driver|HIP|cuDNN|NCCL) error|CUBLAS_STATUS_|CUDNN_STATUS_|device-side assert|DefaultCPUAllocator"
)
"""What torch says in a plain RuntimeError: of a library of the device, and of the CPU's memory."""


def is_device_lost(error: BaseException) -> bool:
    """Whether each later step would fail, too: the device's context is broken, or memory ran out beside the plan."""
    known = (torch.AcceleratorError, torch.OutOfMemoryError, MemoryError)
    return isinstance(error, known) or (isinstance(error, RuntimeError) and bool(_TEXTS.search(str(error))))
