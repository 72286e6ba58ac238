"""Detects the device, cores and memory that this process may use."""

import sys
from pathlib import Path

from penstock import native
from penstock.config.memory import Machine
from penstock.errors import ConfigError
from penstock.system.host import free_memory, physical_cores

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia")
"""Of NVIDIA's GPUs, of AMD's, and of Windows' in its subsystem for Linux."""


def detect_machine(device: str) -> Machine:
    """Detect the machine for `device`; "auto" is a GPU if there is one.

    Raises:
        ConfigError: there is no such device.
    """
    device = _settle(device)
    memory = free_memory() if device == "cpu" else _gpu_memory(device)
    library = native.library() if device == "cpu" else None
    return Machine(
        device=device,
        cores=physical_cores(),
        memory=memory,
        native=library is not None,
        multiplies_bfloat16=library is not None and library.multiplies_bfloat16,
    )


def _settle(device: str) -> str:
    if device == "cpu":
        return device
    count = num_gpus()
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if device == "auto":
        return "cuda" if count else "cpu"
    if device not in known:
        raise ConfigError(f"there is no device {device!r}; available: {', '.join(known)}")
    return device


def num_gpus() -> int:
    """Number of GPUs that torch can use. It is not imported, which takes a second, where Linux has no driver of any."""
    if "torch" not in sys.modules and sys.platform == "linux" and not any(Path(path).exists() for path in _DRIVERS):
        return 0
    try:
        import torch
    except ModuleNotFoundError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu_memory(device: str) -> int:
    """Free bytes of a GPU's memory."""
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])
