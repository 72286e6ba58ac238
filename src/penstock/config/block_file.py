"""The file in which an engine stores computed KV blocks, for itself (`--kv-disk`) or for the engines that decode."""

import os

from penstock.config.byte_counts import parse_bytes
from penstock.config.engine_config import EngineConfig
from penstock.config.memory import MemoryPlan
from penstock.dataclass import dataclass
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BlockFileSettings:
    """Where the blocks are stored, and how many bytes of them."""

    path: str | None
    """Path of the file; None: a temporary file, which other engines read."""
    size: int
    """Size in bytes."""


DEFAULT_BLOCK_FILE = 10 * 2**30
EXPORTED_BYTES = 4 * 2**30
"""Size of the temporary file from which other engines read a prefill engine's blocks."""


def block_file(config: EngineConfig, memory: MemoryPlan, model: str) -> BlockFileSettings | None:
    """The block file, for an engine that stores blocks on disk or transfers them to others; None: it does neither."""
    wanted, role = config.cache.kv_disk, config.role
    if wanted is None and role == "any":
        return None
    what = "kv_disk keeps" if wanted is not None else "a prefill engine hands on"
    if not config.cache.enable_prefix_caching:
        raise ConfigError(f"{what} blocks of the prefix cache: leave enable_prefix_caching on")
    if memory.groups[0].window is not None or any(group.checkpoint_every is not None for group in memory.groups):
        raise ConfigError(
            f"{what} blocks of models with layers that keep all keys, and without recurrent layers; {model} has "
            "sliding windows only, or recurrent layers: leave the option out"
        )
    if wanted is None:
        return BlockFileSettings(None, EXPORTED_BYTES) if role == "prefill" else None
    path, size = wanted, DEFAULT_BLOCK_FILE
    head, colon, tail = wanted.rpartition(":")
    if colon and os.sep not in tail:
        path, size = head, parse_bytes(tail)
    if not path:
        raise ConfigError(f"kv_disk {wanted!r} names no file: write PATH or PATH:SIZE")
    return BlockFileSettings(os.path.abspath(os.path.expanduser(path)), size)
