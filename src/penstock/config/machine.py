"""Facts of the machine that the memory plan depends on."""

from dataclasses import replace

from penstock.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that an engine runs on."""

    device: str
    """Device that the engine will run on: cpu, cuda or cuda:N."""
    cores: int
    """Physical cores that this process may use."""
    memory: int
    """Bytes free for the engine on `device`."""
    native: bool = False
    """Whether the native CPU kernels are available."""
    is_limited: bool = False
    """Whether `max_memory` lowers `memory` below the free memory."""
    multiplies_bfloat16: bool = False
    """Whether the kernels multiply bfloat16; bfloat16 weights are then stored in 12 bits."""
    gap: str = ""
    """An operation of the model that the native kernels lack, so that the reference computes; empty: none."""

    def without_native_kernels(self, gap: str) -> "Machine":
        """The machine for a model with this gap."""
        return replace(self, native=False, multiplies_bfloat16=False, gap=gap)
