"""Detects the device, cores and memory that this process may use."""

from penstock import native
from penstock.config.machine import Machine
from penstock.errors import ConfigError
from penstock.runner.torch_device import free_gpu_memory, num_gpus
from penstock.system.extras import require_torch
from penstock.system.host import free_memory, physical_cores


def detect_machine(device: str) -> Machine:
    """Detect the machine for `device`; "auto" is a GPU if there is one.

    Raises:
        ConfigError: there is no such device.
        MissingTorchError: it is a GPU, or the native kernels are absent.
    """
    device = _settle(device)
    memory = free_memory() if device == "cpu" else free_gpu_memory(device)
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
    if device.startswith("cuda"):
        require_torch(f"device {device!r}")
    if device not in known:
        raise ConfigError(f"there is no device {device!r}; available: {', '.join(known)}")
    return device
