"""What was prepared for loading a model while torch was imported. Tested by tests/engine/test_startup.py."""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.system.allocator import Allocator
from penstock.system.packed_cache import PackedFile, PackedFileWriter


@dataclass(frozen=True, slots=True)
class Start:
    """What a model is loaded with; by default nothing was prepared."""

    allocator: Allocator = field(default_factory=Allocator)
    """Allocates the memory of weights, caches and states."""
    found: PackedFile | None = None
    """The model's packed weights from the cache, whose pages are being verified."""
    writer: PackedFileWriter | None = None
    """Writes the packed weights to the cache, if they were not found; it holds the lock of its key."""
    imported: Callable[[], None] = lambda: None
    """To be called when torch is imported: ends what runs beside that."""
