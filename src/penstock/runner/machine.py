"""Detects the device, cores and memory that this process may use."""

import torch

from penstock import native
from penstock.config.memory import Machine
from penstock.errors import ConfigError
from penstock.system.host import free_memory, physical_cores


def detect_machine(device: str) -> Machine:
    """Detect the machine for `device`; "auto" is a GPU if there is one.

    Raises:
        ConfigError: there is no such device.
    """
    device = _settle(device)
    memory = free_memory() if device == "cpu" else int(torch.cuda.mem_get_info(torch.device(device))[0])
    library = native.library() if device == "cpu" else None
    return Machine(
        device=device,
        cores=physical_cores(),
        memory=memory,
        native=library is not None,
        multiplies_bfloat16=library is not None and library.multiplies_bfloat16,
    )


def _settle(device: str) -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if device == "auto":
        return "cuda" if count else "cpu"
    if device not in known:
        raise ConfigError(f"there is no device {device!r}; available: {', '.join(known)}")
    return device
