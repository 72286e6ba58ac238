"""What a process does while it imports torch: that takes a core a second or two, and leaves the others idle.

Memory costs time when it is first touched: the system clears it, and where the machine is a virtual one its host does
first. So the memory that packed weights will fill is backed meanwhile.
"""

import ctypes
import gc
import math
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint import DEMO_FOLDER
from penstock.config import EngineConfig
from penstock.host import free_memory, physical_cores

PACKED_SHARE = {None: 1.02, "int8": 0.52, "int4": 0.33}
"""Of the files' bytes, by what the weights are quantized to: the packed ones'. Files are mostly of 16 bits a weight."""

_POPULATE_WRITE = 23  # madvise(2): back it with memory now; since Linux 5.14
_STEP = 16 << 20


@contextmanager
def starting(config: EngineConfig) -> Iterator[Callable[[], None]]:
    """Import torch and load the model within; call what this gives when the first is done and the second begins.

    Until then Python looks for no garbage, of which there is none, and an idle core backs memory for the model if it
    lies in a folder.
    """
    global _reserve
    collecting = gc.isenabled()
    if "torch" not in sys.modules and _on_idle_cores(config.model.device):
        packed = _packed_bytes(config.model.model, config.model.quantization)
        _reserve = Reserve(min(packed, free_memory() // 2))

    def imported() -> None:
        if _reserve is not None:
            _reserve.stop()
        if collecting:
            gc.enable()

    gc.disable()  # a tenth of the import
    try:
        yield imported
    finally:
        imported()
        if _reserve is not None:
            _reserve.give_back_rest()
            _reserve = None


def num_backed() -> int:
    """Bytes that are backed already for the model to be loaded, and that the system does not count as free."""
    return 0 if _reserve is None else _reserve.backed


def zeros(size: int) -> NDArray[np.uint8]:
    """Zeroed bytes, of what is backed already while there is some."""
    taken = None if _reserve is None else _reserve.take(size)
    return np.zeros(size, np.uint8) if taken is None else taken


class Reserve:
    """Memory that a thread of its own backs, from the first byte on, until it is told to stop."""

    def __init__(self, size: int) -> None:
        self._size = math.ceil(max(size, 1) / mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._taken = 0
        self._stopped = threading.Event()
        self.backed = 0
        """Bytes that are backed; the rest is when it is first touched."""
        self._thread = threading.Thread(target=self._back, name="reserve", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Back no more."""
        self._stopped.set()
        self._thread.join()

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """Zeroed bytes that begin a cache line; None if there are not so many left."""
        first = math.ceil(self._taken / 64) * 64
        if first + size > self._size:
            return None
        self._taken = first + size
        return np.frombuffer(self._map, np.uint8, size, first)

    def give_back_rest(self) -> None:
        """Give the system back what was not taken. Nothing can be taken afterwards."""
        first = math.ceil(self._taken / mmap.PAGESIZE) * mmap.PAGESIZE
        if first < self._size:
            self._map.madvise(mmap.MADV_DONTNEED, first)
        self._taken = self._size

    def _back(self) -> None:
        system: Any = ctypes.CDLL(None)  # not mmap's own: while that runs, no other thread of Python does
        system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while not self._stopped.is_set() and self.backed < self._size:
            step = min(_STEP, self._size - self.backed)
            if system.madvise(self._address + self.backed, step, _POPULATE_WRITE):
                return  # an older system, or no memory
            self.backed += step


_reserve: Reserve | None = None


def _on_idle_cores(device: str) -> bool:
    """Whether the model is for this machine's cores, as far as can be told so early, and one of them is idle."""
    on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
    return sys.platform == "linux" and physical_cores() > 1 and on_cpu


def _packed_bytes(model: str | None, quantization: str | None) -> int:
    folder = DEMO_FOLDER if model is None else Path(model)
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return int(files * PACKED_SHARE[quantization])
