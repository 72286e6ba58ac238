"""What a start has prepared for loading a model while modules are imported. Tested by tests/engine/test_startup.py."""

from dataclasses import field

from penstock.dataclass import dataclass
from penstock.system.allocator import Allocator
from penstock.system.packed_file import PackedFile


@dataclass(frozen=True, slots=True)
class Start:
    """What was prepared for loading a model; by default nothing."""

    allocator: Allocator = field(default_factory=Allocator)
    """Allocates the memory of weights, caches and states."""
    found: PackedFile | None = None
    """The model's packed weights from the cache, whose pages are being verified."""
