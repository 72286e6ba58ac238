"""What a start has prepared for loading a model while modules are imported. Tested by tests/engine/test_startup.py."""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.system.allocator import Allocator
from penstock.system.packed_file import PackedFile


@dataclass(frozen=True, slots=True)
class Start:
    """What was prepared for loading a model; by default nothing."""

    allocator: Allocator = field(default_factory=Allocator)
    """Allocates the memory of weights, caches and states."""
    found: PackedFile | None = None
    """The model's packed weights from the cache, whose pages are being verified."""
    imported: Callable[[], None] = lambda: None
    """To be called when the engine's modules are imported."""
