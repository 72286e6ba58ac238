"""The device as torch knows it: GPUs and their memory, and errors after which no step succeeds."""

import re
import sys
from pathlib import Path
from typing import Any

from penstock.system.extras import has_torch

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia")
"""Of NVIDIA's GPUs, of AMD's, and of Windows' in its subsystem for Linux."""
_TEXTS = re.compile(
    "(CUDA|CUDA driver|HIP|cuDNN|NCCL) error|CUBLAS_STATUS_|CUDNN_STATUS_|device-side assert|DefaultCPUAllocator"
)
"""Messages of torch's plain RuntimeErrors for a failed device library, or no memory on the CPU."""


def num_gpus() -> int:
    """Number of GPUs that torch can use. It is not imported, which takes a second, where Linux has no driver of any."""
    if "torch" not in sys.modules and sys.platform == "linux" and not any(Path(path).exists() for path in _DRIVERS):
        return 0
    if not has_torch():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_gpu_memory(device: str) -> int:
    """Free bytes of a GPU's memory."""
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def empty_device_cache(device: str) -> None:
    """Return the memory that torch holds of a GPU, but no longer uses."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def identity(device: str) -> tuple[str, str, str]:
    """torch's version, and the kind and name of its device."""
    import torch

    name = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else ""
    return torch.__version__, device.partition(":")[0], name


def is_device_lost(error: BaseException) -> bool:
    """Whether every later step would fail, too: the device's context is broken, or memory ran out despite the plan."""
    torch: Any = sys.modules.get("torch")  # if it was never imported, the error is not torch's
    known = () if torch is None else (torch.AcceleratorError, torch.OutOfMemoryError)
    return isinstance(error, (*known, MemoryError)) or (
        isinstance(error, RuntimeError) and bool(_TEXTS.search(str(error)))
    )
